"""Two processes do what one does, in copies (DDP) and in shards (FSDP), and go on from each other's checkpoints."""

import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml

from linformers.training.checkpointing import step_of
from linformers.training.monitor import read_metrics

from ..forks import Command, in_two
from . import sharding, small

ROOT = Path(__file__).parents[2]
# Dropout is drawn in each process, so that only a run without it can be the same in two.
SAME = {"model": {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}, "steps": 20, "log_every": 1}


LAUNCH = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2", "-m", "linformers"]


def command(recipe, folder):
    path = folder / "recipe.yaml"
    path.write_text(yaml.safe_dump(recipe.to_dict()))
    return ["pretrain", str(path)]


def torchrun(recipe, folder):
    return subprocess.Popen(
        [*LAUNCH, *command(recipe, folder)], cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )


def assert_runs_in_two(target, folder):
    """As by torchrun, whose processes take many seconds to import what these have."""
    log = folder / "log"
    assert in_two(target, log) == 0, log.read_text()[-3000:]


def losses(out):
    return [record["loss"] for record in read_metrics(out) if "loss" in record]


def test_a_run_that_fails_is_told(tmp_path):
    assert in_two(Command(["pretrain", "nowhere.yaml"]), tmp_path / "log") == 2
    assert "recipe 'nowhere.yaml' does not exist" in (tmp_path / "log").read_text()


@pytest.fixture(scope="module")
def single(corpus, tmp_path_factory):
    out = tmp_path_factory.mktemp("single")
    assert small.train(small.recipe(corpus, out, **SAME)) == 0
    return out


@pytest.mark.parametrize("shard", [False, True], ids=["copies", "shards"])
def test_two_processes_equal_one(corpus, single, shard, tmp_path):
    recipe = small.recipe(corpus, tmp_path / "run", **SAME, shard=shard, rows_at_once=2)
    assert_runs_in_two(Command(command(recipe, tmp_path)), tmp_path)
    assert len(losses(tmp_path / "run")) == 20
    assert losses(tmp_path / "run") == pytest.approx(losses(single), abs=1e-5)
    assert read_metrics(tmp_path / "run")[-1]["eval_loss"] == pytest.approx(
        read_metrics(single)[-1]["eval_loss"], abs=1e-5
    )


@pytest.mark.parametrize(("first", "second"), [(1, 2), (2, "shards"), ("shards", 1)], ids=str)
def test_going_on_with_another_number_of_processes(corpus, single, first, second, tmp_path):
    """The first ten steps by one kind of run, the others by another."""
    out = tmp_path / "run"

    def train(kind):
        recipe = small.recipe(corpus, out, **SAME, shard=kind == "shards", save_every=10)
        if kind == 1:
            assert small.train(recipe) == 0
        else:
            assert_runs_in_two(Command(command(recipe, tmp_path)), tmp_path)

    train(first)
    shutil.rmtree(out / "model")
    shutil.rmtree(out / "checkpoint-20")
    assert (out / "checkpoint-10").exists()
    train(second)
    assert losses(out) == pytest.approx(losses(single), abs=1e-5)


def test_shards_need_processes(corpus, tmp_path):
    with pytest.raises(ValueError, match="shard=true needs several processes: start the command with torchrun"):
        small.train(small.recipe(corpus, tmp_path, shard=True))


def test_each_process_holds_its_shard(tmp_path):
    assert_runs_in_two(sharding.main, tmp_path)


def test_signal_stops_all_processes_after_the_same_step(corpus, tmp_path):
    out, straight = tmp_path / "run", tmp_path / "straight"
    options = {**SAME, "steps": 100, "save_every": 1000, "eval_every": 1000}
    assert small.train(small.recipe(corpus, straight, **options)) == 0
    recipe = small.recipe(corpus, out, **options, rows_at_once=1)
    process = torchrun(recipe, tmp_path)
    while process.poll() is None and not losses(out):
        time.sleep(0.005)
    process.send_signal(signal.SIGTERM)
    process.wait(60)
    (checkpoint,) = out.glob("checkpoint-*")
    assert step_of(checkpoint) < 100
    assert torchrun(recipe, tmp_path).wait() == 0
    assert losses(out) == pytest.approx(losses(straight), abs=1e-4)
