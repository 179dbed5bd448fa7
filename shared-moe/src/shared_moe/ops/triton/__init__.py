"""Triton kernels, one file each: the kernel and the function that launches it.

The ops import these modules where they run, so that Triton is needed only on a GPU. Products accumulate in float32 and
every sum has one order, so results are bitwise repeatable on one device; float32 products are IEEE unless
`torch.backends.cuda.matmul.allow_tf32` is set. Row offsets are int64: arguments that are multiplied into an address are
annotated so.
"""
