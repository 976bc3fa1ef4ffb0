"""The compiled core: arithmetic on host memory in one pass, written in C.

The kernels know nothing of PyTorch; they get addresses and numbers. Whoever calls one has the same
arithmetic in PyTorch beside it, which gives the same bits and is used where nothing compiled can be
had. `library.core()` says which it is. May import base modules only. Begin at `library`, then read
`kernels/`.
"""
