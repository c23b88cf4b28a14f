"""The ORT C ABI as tables, version negotiation, and the boundary between exceptions and statuses."""
