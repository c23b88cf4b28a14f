"""The ORT C ABI as tables, version negotiation, and Python's bindings of the C library: its core and the driver
table.
"""
