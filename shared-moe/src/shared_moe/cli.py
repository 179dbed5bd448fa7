"""`shared-moe`: what this machine can do, how fast it is, and what a checkpoint holds."""

import json
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from shared_moe.console import run

app = typer.Typer(
    help="Mixture-of-Experts core: look at this machine and into checkpoints.",
    no_args_is_help=True,
    rich_markup_mode="markdown",
)
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON for a script.")]


class Dtype(StrEnum):
    float32 = "float32"
    bfloat16 = "bfloat16"


@app.command(epilog="Example: `shared-moe doctor --json`")
def doctor(as_json: AsJson = False) -> None:
    """Say what Python, torch, processor, compiler and GPU are here, and which backend runs for each op and why."""
    from shared_moe import doctor as machine

    facts = machine.examine()
    typer.echo(json.dumps(facts, indent=2) if as_json else machine.describe(facts))


@app.command(
    epilog="Examples: `shared-moe bench --tokens 2048 --dtype bfloat16 --backward`, `shared-moe bench --gpu > gpu.md`"
)
def bench(
    tokens: Annotated[int, typer.Option(min=1, help="Tokens a pass.")] = 512,
    dim: Annotated[int, typer.Option(min=1, help="Model width.")] = 256,
    hidden: Annotated[int, typer.Option(min=1, help="Hidden width of one expert.")] = 512,
    experts: Annotated[int, typer.Option(min=1, help="Number of experts.")] = 16,
    top_k: Annotated[int, typer.Option(min=1, help="Experts a token visits.")] = 4,
    dtype: Annotated[Dtype, typer.Option(help="Type of the numbers.")] = Dtype.float32,
    backward: Annotated[bool, typer.Option("--backward", help="Time forward and backward.")] = False,
    rounds: Annotated[int, typer.Option(min=1, help="Rounds; the fastest counts.")] = 5,
    seed: Annotated[int, typer.Option(help="Seed of weights and tokens.")] = 0,
    gpu: Annotated[
        bool,
        typer.Option(
            "--gpu",
            help="Check every op on the GPU, then time layers of three published models: under six minutes; of the "
            "other options only --seed and --json count.",
        ),
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Time one MoE layer side by side with the usual ways to write it and with the dense limit."""
    if gpu:
        from shared_moe.gpu import bench as gpu_timing

        found = gpu_timing.bench_gpu(seed)
        typer.echo(json.dumps(found, indent=2) if as_json else gpu_timing.describe(found))
        if not all(check["passed"] for check in found["checks"]):
            raise typer.Exit(1)
        return
    from shared_moe import bench as timing

    result = timing.bench(
        tokens, dim, hidden, experts, top_k, dtype=dtype.value, backward=backward, rounds=rounds, seed=seed
    )
    typer.echo(json.dumps(result, indent=2) if as_json else timing.describe(result))


@app.command(
    epilog="Examples: `shared-moe inspect ./OLMoE-1B-7B`, `shared-moe inspect ./OLMoE-1B-7B --quick --json`"
)
def inspect(
    checkpoint: Annotated[Path, typer.Argument(help="Folder with config.json and *.safetensors.")],
    quick: Annotated[
        bool, typer.Option("--quick", help="Shapes and routers only; do not read the experts.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Show the experts and routers of a checkpoint: shapes, sizes, router norms, near-duplicate experts, coupling."""
    from shared_moe.checkpoint import describe, inspect_checkpoint

    found = inspect_checkpoint(checkpoint, quick=quick)
    typer.echo(json.dumps(found.as_dict(), indent=2) if as_json else describe(found))


def main() -> None:
    run(app)


if __name__ == "__main__":
    main()
