"""What the compilers make of every kernel for GPUs that need not be here: a Markdown table.

    python shared-moe/benchmarks/gpu_compile.py [--every]

One row a kernel, tile and architecture: registers a thread, bytes of shared memory, spilled bytes, the matrix
instructions and whether tiles come through the tensor memory accelerator, all read from the machine code. Without
--every: the largest tile and the decoding tile that the launcher may choose.
"""

import argparse

import torch
import triton

from shared_moe.ops.cuda import nvrtc
from shared_moe.ops.cuda.compile_only import cuda_rows
from shared_moe.ops.triton.compile_only import ARCHS, cases, examine

COLUMNS = ("registers", "shared", "spills", "mma", "tma")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--every", action="store_true", help="every configuration that the launcher may choose"
    )
    every = parser.parse_args().every
    print(f"torch {torch.__version__}, triton {triton.__version__} in bfloat16; {nvrtc.status()}\n")
    print("| kernel | tile | arch | registers | shared | spilled | matrix instructions | TMA |")
    print("| --- | --- | --- | --- | --- | --- | --- | --- |")
    rows = [examine(case, arch) for arch in ARCHS for case in cases(arch, every=every)]
    rows.sort(key=lambda row: row["kernel"])
    rows += cuda_rows()
    for row in rows:
        shown = [str(row[c]).replace("True", "yes").replace("False", "-") for c in COLUMNS]
        name = row["kernel"].removesuffix("_kernel")
        print(f"| {name} | {row['tile']} | sm_{row['arch']} | {' | '.join(shown)} |")


if __name__ == "__main__":
    main()
