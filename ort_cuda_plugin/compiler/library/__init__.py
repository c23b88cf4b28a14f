"""The kernel library: hands out compiled kernels, and has helper processes compile them."""
