"""Runs of `linformers pretrain` side by side: perplexity over seeds, against steps and against training time.

    python benchmarks/quality.py runs/quality --out results/quality

The folder holds a run for each variant and seed, named VARIANT-sSEED; one variant is called twin. Training time is
reckoned from the best speed that a run logged, since others may have shared its GPU.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections import defaultdict
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from linformers import plots
from linformers.benchmark.report import markdown
from linformers.provenance import commit, environment

TWIN = "twin"


def read(folder: Path) -> dict[str, list[list[dict[str, Any]]]]:
    """The records of all runs, by variant."""
    found = defaultdict(list)
    for path in sorted(folder.glob("*-s*/metrics.jsonl")):
        variant, _, _ = path.parent.name.rpartition("-s")
        found[variant].append([json.loads(line) for line in path.read_text().splitlines()])
    if not found:
        raise SystemExit(f"{folder} has no runs named VARIANT-sSEED")
    return dict(found)


def summary(runs: list[list[dict[str, Any]]], tokens: int) -> dict[str, Any] | None:
    """The mean curve of a variant's perplexity, its spread at the end, and the seconds of a step."""
    curves = [{r["step"]: r["perplexity"] for r in records if "perplexity" in r} for records in runs]
    if not all(curves):
        return None
    steps = sorted(set.intersection(*map(set, curves)))
    speeds = [r["tokens_per_second"] for records in runs for r in records if "tokens_per_second" in r]
    last = [curve[steps[-1]] for curve in curves]
    return {
        "seeds": len(runs),
        "last": last,
        "mean": statistics.mean(last),
        "std": statistics.stdev(last) if len(last) > 1 else 0.0,
        "curve": [[step, statistics.mean(curve[step] for curve in curves)] for step in steps],
        "seconds_per_step": tokens / max(speeds) if speeds else None,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])  # type: ignore[union-attr]
    parser.add_argument("folder", type=Path)
    parser.add_argument("--tokens", type=int, default=32768, help="of a step")
    parser.add_argument("--out", type=Path, default=Path("runs/bench"))
    options = parser.parse_args()
    summaries = {variant: summary(runs, options.tokens) for variant, runs in read(options.folder).items()}
    lines = [f"{variant} has no perplexity and is left out." for variant, own in summaries.items() if own is None]
    variants = {variant: own for variant, own in summaries.items() if own is not None}
    twin = variants.get(TWIN)

    table = Table("variant", "seeds", "perplexity", "of the twin's", "time of a step, of the twin's")
    table.title = f"Validation perplexity after {max(own['curve'][-1][0] for own in variants.values()):,} steps"
    for variant, own in sorted(variants.items(), key=lambda item: item[1]["mean"]):
        ratio = f"{own['mean'] / twin['mean']:.2f}" if twin else "–"
        timed = twin and twin["seconds_per_step"] and own["seconds_per_step"]
        time = f"{own['seconds_per_step'] / twin['seconds_per_step']:.1f}" if twin and timed else "–"
        table.add_row(variant, str(own["seeds"]), f"{own['mean']:.1f} ± {own['std']:.1f}", ratio, time)
    console = Console()
    console.print(table)
    for line in lines:
        console.print(line, highlight=False)
    options.out.mkdir(parents=True, exist_ok=True)
    where = {"commit": commit(), **environment()}
    (options.out / "quality.json").write_text(json.dumps({**where, "variants": variants}, indent=1) + "\n")
    (options.out / "quality.md").write_text(markdown([table], lines, where, "Quality"), encoding="utf-8")
    curves = {variant: own["curve"] for variant, own in variants.items()}
    against_time = {
        variant: [(step * own["seconds_per_step"] / 60, value) for step, value in own["curve"]]
        for variant, own in variants.items()
        if own["seconds_per_step"]
    }
    for suffix in ("png", "svg"):
        plots.quality(curves, against_time, options.out / f"quality.{suffix}")
    console.print(f"Written to {options.out}", markup=False)


if __name__ == "__main__":
    main()
