"""What `shared-moe bench --gpu` is made of, on the CPU and small; on a GPU the real thing."""

import json
import time

import pytest
import torch
from typer.testing import CliRunner

from shared_moe.cli import app
from shared_moe.errors import RefusedError
from shared_moe.gpu import bench, check
from shared_moe.gpu.bench import Ceilings, Shape
from shared_moe.ops.backend import KERNELS

needs_gpu = pytest.mark.skipif(
    not torch.cuda.is_available(), reason="no GPU: ops and speed were not tried on one"
)


def checked() -> list[check.Check]:
    return list(check.check_ops("cpu", tokens=60, width=32))


def test_every_op_with_a_kernel_is_checked_and_right():
    found = checked()
    assert {c.op.split()[0] for c in found} == set(KERNELS)
    assert [c for c in found if not c.passed] == []


@pytest.mark.parametrize("op", ["combine", "spectral_linear"])
@pytest.mark.parametrize("harm", [1.01, float("nan")])
def test_a_wrong_answer_is_found(op, harm, monkeypatch):
    right = getattr(check, op)

    def wrong(x, *rest, **options):
        y = right(x, *rest, **options)
        return y * harm if x.dtype == torch.float32 else y

    monkeypatch.setattr(check, op, wrong)
    failed = {(c.op, c.dtype) for c in checked() if not c.passed}
    assert failed == {(op, "float32")}


def test_biased_samples_are_found(monkeypatch):
    right = check.sample_log_dirichlet
    monkeypatch.setattr(check, "sample_log_dirichlet", lambda a, g: right(a + 0.05, g))
    assert [c.op for c in checked() if not c.passed] == ["sample_log_dirichlet"]


def stopwatch(run) -> float:
    started = time.perf_counter()
    run()
    return 1e3 * (time.perf_counter() - started)


SMALL = Shape(dim=32, hidden=16, experts=8, top_k=2)


@pytest.mark.parametrize("backward", [False, True])
def test_a_cell_times_every_way_and_they_agree(backward):
    ceilings = bench.measure_ceilings("cpu", stopwatch, side=64)
    assert min(ceilings.bytes, ceilings.flops) > 0
    cell = bench.measure_cell("small", SMALL, 40, backward, "cpu", ceilings, stopwatch)
    assert list(cell.milliseconds) == [
        bench.OURS,
        "torch grouped_mm",
        "transformers grouped_mm",
        "transformers eager",
    ]
    assert cell.ahead == min(list(cell.milliseconds.values())[1:]) / cell.milliseconds[bench.OURS]


def test_the_ways_agree():
    g = torch.Generator().manual_seed(0)
    gate_up, down = (
        torch.nn.Parameter((torch.randn(*s, generator=g) * 0.2).bfloat16())
        for s in ((8, 32, 32), (8, 32, 16))
    )
    x = torch.randn(40, 32, generator=g).bfloat16()
    weights, ids = torch.rand(40, 8, generator=g).topk(2)
    ours, *others = (
        way(x, ids, weights.bfloat16()).float() for way in bench.ways(SMALL, 40, gate_up, down).values()
    )
    for other in others:
        torch.testing.assert_close(other, ours, rtol=0.02, atol=0.02)


def test_the_floor_counts_bytes_when_decoding_and_flops_when_training():
    ceilings = Ceilings(bytes=1e12, flops=1e15)
    olmoe = bench.MODELS["OLMoE-1B-7B"]
    one_expert = 3 * 2048 * 1024
    ms, bound = bench.floor_ms(olmoe, 40, 8, False, ceilings)
    assert bound == "bytes"
    assert ms == pytest.approx(2 * (40 * one_expert + 2 * 8 * 2048) / 1e12 * 1e3)
    ms, bound = bench.floor_ms(olmoe, 64, 65536, True, ceilings)
    assert bound == "flops"
    assert ms == pytest.approx(3 * 2 * 65536 * 8 * one_expert / 1e15 * 1e3)


def test_the_plan_holds_every_model_and_size_and_training_of_the_large():
    cells = list(bench.plan())
    assert {(m, t) for m, t, _ in cells} == {(m, t) for m in bench.MODELS for t in bench.TOKENS}
    assert {t for _, t, backward in cells if backward} == {8192, 65536}


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU is there")
def test_without_a_gpu_the_command_says_so():
    result = CliRunner().invoke(app, ["bench", "--gpu"])
    assert isinstance(result.exception, RefusedError)
    assert "needs a CUDA GPU" in str(result.exception)


def test_the_report_names_failures_and_what_was_left_out(monkeypatch):
    cell = bench.Cell("m", 8, False, {bench.OURS: 2.0, "other": 3.0}, "bytes", 0.5)
    failed = check.Check("combine", "triton", "float32", 0.5, 1e-5)
    result = {
        "device": "a GPU",
        "torch": "2",
        "ceilings": {"bytes": 1e12, "flops": 1e15},
        "checks": [vars(failed) | {"passed": failed.passed}],
        "cells": [vars(cell) | {"ahead": cell.ahead}],
        "left_out": ["m, 9 tokens: out of time"],
    }
    text = bench.describe(result)
    assert "**WRONG**" in text
    assert "| m | 8 | forward | 2.000 | 3.000 | 1.50 | 50 % | bytes |" in text
    assert "Left out: m, 9 tokens: out of time" in text
    monkeypatch.setattr(bench, "bench_gpu", lambda seed: result)
    assert CliRunner().invoke(app, ["bench", "--gpu"]).exit_code == 1
    assert json.loads(CliRunner().invoke(app, ["bench", "--gpu", "--json"]).stdout) == result


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("seed", [0, 1])
def test_every_op_is_right_on_the_gpu(seed):
    found = list(check.check_ops("cuda", seed=seed))
    assert [c for c in found if not c.passed] == []
    assert {c.backend for c in found} >= {"triton"}
