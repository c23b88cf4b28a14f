"""The ORT C ABI as tables, version negotiation, and what Python sees of the C library: its core and the driver."""
