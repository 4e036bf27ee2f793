"""Code shared by all kernels: launching, PDL, lanes, paged addresses, Philox."""
