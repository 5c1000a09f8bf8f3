"""Time and memory against the bars, and against a plain per-client loop measured in the same run.

`make bench` runs every case, each in a process of its own; `python benchmarks/run.py CASE …` runs some.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

Figure = dict[str, Any]


def pfedrec_ml_100k() -> list[Figure]:
    from homebody.data import load

    return _rounds_and_run(load("ml-100k"), rounds=100, every=1, wall=20.0, memory=None, plain=True, sample=943)


def pfedrec_ml_1m() -> list[Figure]:
    from homebody.data import load

    return _rounds_and_run(load("ml-1m"), rounds=100, every=10, wall=120.0, memory=2000.0, plain=False, sample=200)


def _rounds_and_run(
    population: Any, rounds: int, every: int, wall: float, memory: float | None, plain: bool, sample: int
) -> list[Figure]:
    from loop import seconds_per_client

    from homebody.data import load
    from homebody.data.partitions import leave_one_out
    from homebody.methods.pfedrec import PFedRec
    from homebody.simulation import Simulator
    from homebody.training import fit

    split = leave_one_out(population, protocol="published")
    small = leave_one_out(load("synthetic"), protocol="published")
    fit(PFedRec(), Simulator(small), rounds=1)  # compiles
    seconds: list[float] = []
    began = time.perf_counter()
    fitted = fit(
        PFedRec(),
        Simulator(split),
        rounds=rounds,
        evaluate_every=every,
        on_round=lambda line: seconds.append(line.seconds),
    )
    took = time.perf_counter() - began
    peak = _peak_mb()
    name = f"PFedRec, {population.name}"
    loop = seconds_per_client(split, "pfedrec", 32, sample) * split.n_users
    figures = [
        _figure(f"{name}, {rounds} rounds, evaluated every {every}", took, wall, "s"),
        _figure(f"{name}, training round, wall", sorted(seconds)[len(seconds) // 2], None, "s", loop),
    ]
    if memory is not None:
        figures.append(_figure(f"{name}, peak memory", peak, memory, "MB"))
    figures += [
        _figure(f"{name}, {metric}, published protocol, seed 0", fitted.metrics[metric], None, "")
        for metric in ("hr@10", "ndcg@10")
    ]
    if plain:
        figures.append(_figure(f"{name}, training round, CPU, kernel", _cpu_of_round(split, True), 0.1, "s", loop))
        figures.append(_figure(f"{name}, training round, CPU, plain vmap", _cpu_of_round(split, False), 0.4, "s", loop))
    return figures


def _cpu_of_round(split: Any, fused: bool) -> float:
    from homebody.methods.pfedrec import PFedRec
    from homebody.rng import Rng
    from homebody.simulation import Simulator
    from homebody.training import choose

    method, simulator = PFedRec(), Simulator(split, fused=fused)
    shared = method.init_shared(simulator.catalogue, Rng.of(0))
    simulator.begin(method, Rng.of(1))
    spent = []
    everyone = choose(simulator.available(), None, Rng.of(2))
    for step in range(8):
        began = time.process_time()
        got = simulator.collect(method, shared, everyone, Rng.of(2, step), step)
        shared, _ = method.server(shared, {}, got.total)
        spent.append(time.process_time() - began)
    return sorted(spent)[len(spent) // 2]


def fedials_ml_1m() -> list[Figure]:
    from loop import seconds_per_client

    from homebody.data import load
    from homebody.data.partitions import leave_one_out
    from homebody.methods.fedials import FedIALS
    from homebody.simulation import Simulator
    from homebody.training import fit

    split = leave_one_out(load("ml-1m"))
    seconds: list[float] = []
    fitted = fit(FedIALS(), Simulator(split), rounds=5, on_round=lambda line: seconds.append(line.seconds))
    loop = seconds_per_client(split, "fedials", 16, 500) * split.n_users
    return [
        _figure("FedIALS, ml-1m, 16 factors, round", sorted(seconds)[2], 3.0, "s", loop),
        _figure("FedIALS, ml-1m, hr@10, strict protocol, seed 0", fitted.metrics["hr@10"], None, ""),
    ]


def maml_against_reptile() -> list[Figure]:
    """A round of each on the same network and people, through plain vmap.

    MAML's steps are of the support half of the data. With 9 of them and the query's gradient it takes in as many
    samples as REPTILE does in 5 steps of all.
    """
    import numpy as np

    from homebody.core import Cohort
    from homebody.data import load
    from homebody.data.partitions import leave_one_out
    from homebody.methods.nn_self import NNSelf
    from homebody.methods.privrec import PrivRec
    from homebody.rng import Rng
    from homebody.simulation import Simulator

    split = leave_one_out(load("ml-1m"))
    few = np.flatnonzero(split.lengths > 1)[:: split.n_users // 40][:40]
    methods = {
        "REPTILE, 5 steps": PrivRec(hidden="64,64,64,64", epochs=5, batch_size=0),
        "MAML, 5 steps": NNSelf(hidden="64,64,64,64", epochs=5),
        "MAML, 5 steps, first order": NNSelf(hidden="64,64,64,64", epochs=5, first_order=True),
        "MAML, 9 steps": NNSelf(hidden="64,64,64,64", epochs=9),
    }
    figures = []
    for size in (5, 10, 20, 40):
        cohort = Cohort(few[:size], "fixed", size, split.n_users)
        seconds = {}
        for name, method in methods.items():
            simulator = Simulator(split, fused=isinstance(method, NNSelf))  # its kernel is vmap, a few at a time
            shared = method.init_shared(simulator.catalogue, Rng.of(0))
            simulator.begin(method, Rng.of(1))
            spent = []
            for step in range(4):
                began = time.process_time()
                simulator.collect(method, shared, cohort, Rng.of(2, step), step)
                spent.append(time.process_time() - began)
            seconds[name] = min(spent[1:])
            figures.append(_figure(f"{name}, ml-1m, a round of {size}, CPU", seconds[name], None, "s"))
        first, *others = methods
        figures += [
            _figure(f"{name} / {first}, a round of {size}", seconds[name] / seconds[first], None, "×")
            for name in others
        ]
    return figures


def fedmf_million() -> list[Figure]:
    from loop import seconds_per_client

    from homebody.data import load
    from homebody.data.partitions import leave_one_out
    from homebody.methods.fedmf import FedMF
    from homebody.simulation import Simulator
    from homebody.training import fit

    load("synthetic:users=1000,items=200,mean=20")  # compiles
    began = time.perf_counter()
    population = load("synthetic:users=1000000,items=20000,mean=50")
    built = time.perf_counter() - began
    split = leave_one_out(population)
    seconds: list[float] = []
    fit(
        FedMF(),
        Simulator(split),
        rounds=6,
        cohort=10_000,
        evaluate_every=0,
        on_round=lambda line: seconds.append(line.seconds),
    )
    peak = _peak_mb()
    loop = seconds_per_client(split, "fedmf", 32, 100) * 10_000
    return [
        _figure("synthetic, 1,000,000 users × 20,000 items, built", built, 20.0, "s"),
        _figure("FedMF on it, round with a cohort of 10,000", sorted(seconds[1:])[2], 0.5, "s", loop),
        _figure("FedMF on it, peak memory", peak, 1500.0, "MB"),
    ]


def fmf_ldp_of_the_papers_size() -> list[Figure]:
    """The whole command, from the import on: making the population, 20 rounds, evaluation at the end."""
    data = "synthetic:users=75040,items=9781,mean=231.7"
    figures = []
    for decoder in ("published", "improved"):
        with tempfile.TemporaryDirectory() as folder:
            command = [str(Path(sys.executable).parent / "homebody"), "run", "fmf-ldp", "--json", "--out", folder]
            options = ["--data", data, "--evaluate-every", "20", "--set", f"decoder={decoder}"]
            began = time.perf_counter()
            said = subprocess.run([*command, *options], check=True, capture_output=True, text=True).stdout
            took = time.perf_counter() - began
        result = json.loads(said)
        name = f"FMF-LDP, {decoder}, 75,040 users × 9,781 items × 17.4 million, k = 100, 20 rounds"
        figures += [
            _figure(f"{name}, the command", took, 30.0, "s"),
            _figure(f"{name}, a training round", result["seconds_per_round"], None, "s"),
            _figure(f"{name}, peak memory", result["peak_rss_mb"], 1500.0, "MB"),
        ]
    return figures


def privrec_ml_1m() -> list[Figure]:
    """Rounds of 20 devices with 100 passes each; then everyone who was held out adapts likewise and is asked."""
    from homebody.data import load
    from homebody.data.partitions import split
    from homebody.methods.privrec import PrivRec
    from homebody.rng import Rng
    from homebody.simulation import Simulator
    from homebody.training import choose

    method = PrivRec(
        features="age,gender,occupation,genres", hidden="64,64,64,64", epochs=100, adapt_epochs=100, learning_rate=0.1
    )
    held_out = split(load("ml-1m"), "held-out-users:test=0.2,valid=0.05,above=3", negatives=99)
    figures = []
    for fused, bar in ((True, 3.0), (False, 12.0)):
        simulator = Simulator(held_out, fused=fused)
        shared = method.init_shared(simulator.catalogue, Rng.of(0))
        simulator.begin(method, Rng.of(1))
        few = choose(simulator.available(), 2, Rng.of(2))
        simulator.collect(replace(method, epochs=1, adapt_epochs=1), shared, few, Rng.of(2), 0)  # compiles
        seconds = []
        for step in range(5 if fused else 1):
            cohort = choose(simulator.available(), 20, Rng.of(3, step))
            began = time.perf_counter()
            simulator.collect(method, shared, cohort, Rng.of(4, step), step)
            seconds.append(time.perf_counter() - began)
        kind = "kernel" if fused else "plain vmap"
        name = f"PrivRec, ml-1m, round of 20 devices × 100 passes, {kind}"
        figures.append(_figure(name, sorted(seconds)[len(seconds) // 2], bar, "s"))
        if fused:
            began = time.perf_counter()
            simulator.evaluate(method, shared)
            took = time.perf_counter() - began
            figures.append(_figure("PrivRec, ml-1m, held-out users adapt 100 passes and are asked", took, 90.0, "s"))
    return [*figures, _figure("PrivRec, ml-1m, peak memory", _peak_mb(), None, "MB")]


def fl_mv_dssm_ml_100k() -> list[Figure]:
    """Rounds of 100 devices with two views each, clipped and noised; then 100 rounds with 10 evaluations."""
    from homebody.data.partitions import split
    from homebody.methods.fl_mv_dssm import FLMVDSSM
    from homebody.privacy import Channel, ViewNoise, Views
    from homebody.recipe import Recipe
    from homebody.run import population_of
    from homebody.simulation import Simulator
    from homebody.training import fit

    people = population_of(Recipe("fl-mv-dssm", "ml-100k", views={"taste": "svd:size=30,share=0.5"}))
    simulator = Simulator(split(people, "ratio:test=0.2,valid=0", how="random"))
    noisy = Channel(Views(0.5), ViewNoise(z=1.0))
    figures = []
    for semi in (False, True):
        method = FLMVDSSM(noisy, views="profile,taste", negatives=4, aggregate_users=not semi)
        fit(method, simulator, rounds=2, cohort=100)  # compiles
        seconds: list[float] = []
        began = time.perf_counter()
        fit(
            method,
            simulator,
            rounds=100,
            cohort=100,
            evaluate_every=10,
            on_round=lambda line, found=seconds: found.append(line.seconds),
        )
        took = time.perf_counter() - began
        name = f"{'SEMI-' if semi else ''}FL-MV-DSSM, ml-100k, 2 views"
        figures += [
            _figure(f"{name}, round of 100 devices × 20 positives × 4 negatives", sorted(seconds)[50], 0.2, "s"),
            _figure(f"{name}, 100 rounds and 10 evaluations", took, 40.0, "s"),
        ]
    return [*figures, _figure("FL-MV-DSSM, ml-100k, peak memory", _peak_mb(), 1000.0, "MB")]


def news_rounds() -> list[Figure]:
    """Rounds of 128 people with 50 clicks each on titles of 30 words, NRMS of the paper's size: gradients summed,
    clipped one by one, and reports. On a GPU too, where there is one."""
    import torch

    from homebody.methods.fedrec import FedRec
    from homebody.methods.privaterec import PrivateRec
    from homebody.privacy import Channel, Clip

    own = {"encoder": "nrms", "words": "random"}
    figures = []
    for name, bar, method in (
        ("summed", 5.0, FedRec(**own)),
        ("clipped", 10.0, FedRec(uplink=Channel(Clip(0.005)), **own)),
        ("reported, one step of the server", 5.0, PrivateRec(**own, steps=1)),
    ):
        figures.append(_figure(f"NRMS round of 128, {name}", _news_round(method, "cpu"), bar, "s"))
    figures.append(_figure("NRMS rounds, peak memory", _peak_mb(), 4_000.0, "MB"))
    if torch.cuda.is_available():
        figures.append(_figure("NRMS round of 128, summed, GPU", _news_round(FedRec(**own), "cuda"), 0.5, "s"))
    return figures


def _news_round(method: Any, device: str) -> float:
    """Seconds of a round after the first."""
    from homebody.simulation import Simulator
    from homebody.training import fit

    seconds: list[float] = []
    fit(
        method,
        Simulator(_news_readers(), device=device),
        rounds=3,
        cohort=128,
        evaluate_every=0,
        on_round=lambda line: seconds.append(line.seconds),
    )
    return min(seconds[1:])


def _news_readers() -> Any:
    """140 people with 50 clicks and an impression each, and 2,000 titles of 30 words."""
    import numpy as np
    import polars as pl

    from homebody.data.partitions import split
    from homebody.data.population import Features, Impressions, Population

    draw, people, news = np.random.default_rng(0), 200, 2_000
    titles = [" ".join(f"w{word}" for word in row) for row in draw.integers(0, 5_000, (news, 30))]
    history = np.concatenate([draw.choice(news, 51, replace=False) for _ in range(people)]).astype(np.int32)
    shown = np.concatenate([history[50::51, None], draw.integers(0, news, (people, 19))], axis=1)
    impressions = Impressions(
        np.arange(people),
        np.arange(people + 1) * 20,
        shown.ravel().astype(np.int32),
        np.tile(np.arange(20) == 0, people),
        before=np.full(people, 50),
    )
    population = Population(
        "readers",
        np.arange(people + 1) * 51,
        history,
        n_items=news,
        item_features=Features(pl.DataFrame({"title": titles}), {"title": "sequence"}),
        impressions=impressions,
    )
    return split(population, "impressions-people", seed=0)


def news_reading() -> list[Figure]:
    """Impressions in MIND's format, as many as its paper has in one table: made up, of 38 news each."""
    import numpy as np

    from homebody.data import load

    draw, people, news = np.random.default_rng(0), 94_057, 65_238
    ids = np.char.add("N", np.arange(news).astype(str)).tolist()
    histories = [" ".join(ids[item] for item in draw.integers(0, news, 33)) for _ in range(people)]
    with tempfile.TemporaryDirectory() as folder:
        with (Path(folder) / "news.tsv").open("w") as file:
            words = " ".join(f"word{number}" for number in range(11))
            file.writelines(f"{one}\tnews\tworld\t{words} {one}\t{words} {words} {one}\t\t[]\t[]\n" for one in ids)
        with (Path(folder) / "behaviors.tsv").open("w") as file:
            for line in range(230_117):
                items = draw.integers(0, news, 38).tolist()
                shown = " ".join(f"{ids[item]}-{int(place == 7)}" for place, item in enumerate(items))
                who = line % people
                file.write(f"{line}\tU{who}\t11/{1 + line % 28}/2019 9:05:58 AM\t{histories[who]}\t{shown}\n")
        del histories
        began = time.perf_counter()
        found = load(folder).impressions
        took = time.perf_counter() - began
    assert found is not None
    name = f"{len(found.users):,} impressions in MIND's format read"
    return [_figure(name, took, 20.0, "s"), _figure(f"{name}, peak memory", _peak_mb(), 2_000.0, "MB")]


def news_runs() -> list[Figure]:
    """Whole runs of fedrec on IBM's articles, where texts and language model are at hand."""
    return [
        _figure(f"homebody run fedrec, ibm-articles, {encoder}", _run_of("fedrec", "ibm-articles", encoder), bar, "s")
        for encoder, bar in (("plm", 60.0), ("nrms", 480.0))
    ]


def _run_of(method: str, data: str, encoder: str) -> float:
    with tempfile.TemporaryDirectory() as folder:
        return _command("run", method, "--data", data, "--set", f"encoder={encoder}", "--out", folder, times=1)


def exact_noise() -> list[Figure]:
    """Draws of exact noise, and a round of noised FedMF beside one without noise."""
    from homebody.data import load
    from homebody.data.partitions import leave_one_out
    from homebody.methods.fedmf import FedMF
    from homebody.privacy import Channel, Clip, Gaussian
    from homebody.privacy.grid import gaussian, laplace
    from homebody.rng import Rng, SystemRng
    from homebody.simulation import Simulator
    from homebody.training import fit

    figures, count = [], 5_000_000
    for draw in (laplace, gaussian):
        for source, rng in (("seed", Rng.of(0)), ("system", SystemRng())):
            draw(rng, 28, 1000)  # compiles
            began = time.perf_counter()
            draw(rng, 28, count)
            each = (time.perf_counter() - began) / count * 1e9
            figures.append(_figure(f"exact {draw.__name__} noise, a draw, {source}", each, 200.0, "ns"))
    split = leave_one_out(load("ml-100k"))
    for name, channel in (("clip", Channel(Clip(1.0))), ("clip and noise", Channel(Clip(1.0), Gaussian(1.0)))):
        seconds: list[float] = []
        fit(FedMF(uplink=channel), Simulator(split), rounds=1, evaluate_every=0)  # compiles
        fit(
            FedMF(uplink=channel),
            Simulator(split),
            rounds=20,
            evaluate_every=0,
            on_round=lambda one, seconds=seconds: seconds.append(one.seconds),
        )
        figures.append(_figure(f"FedMF round, ml-100k, {name}", sorted(seconds)[10], None, "s"))
    return figures


def help_text() -> list[Figure]:
    return [_figure("homebody --help", _command("--help"), 0.5, "s")]


def data_info() -> list[Figure]:
    return [_figure("homebody data info ml-1m", _command("data", "info", "ml-1m"), 3.0, "s")]


def import_alone() -> list[Figure]:
    """`import homebody` in a process of its own, less than what Python itself takes to count."""
    script = "import time; began = time.perf_counter(); import homebody, sys; took = time.perf_counter() - began; "
    script += "assert 'torch' not in sys.modules; print(took)"
    took = [float(subprocess.check_output([sys.executable, "-c", script])) for _ in range(5)]
    return [_figure("import homebody, without torch", sorted(took)[2], 0.15, "s")]


def frames() -> list[Figure]:
    """`load` of frames of 10 million rows: seconds, and memory beyond the frame's own."""
    import numpy as np
    import pandas as pd
    import polars as pl

    from homebody.data import load

    draw, rows = np.random.default_rng(0), 10_000_000
    frame = pl.DataFrame(
        {
            "user": draw.integers(0, 200_000, rows),
            "item": draw.zipf(1.3, rows) % 50_000,
            "time": draw.integers(1_500_000_000, 1_700_000_000, rows),
            "rating": draw.integers(1, 11, rows) / 2,
        }
    )
    texts = frame.with_columns(pl.format("u{}", "user").alias("user"), pl.format("i{}", "item").alias("item"))
    objects = pd.DataFrame({name: frame[name].to_numpy() for name in ("time", "rating")})
    for name in ("user", "item"):
        called = np.array([f"{name[0]}{number}" for number in range(200_000)], dtype=object)
        objects[name] = pd.Series(called[frame[name].to_numpy()], dtype=object)
    figures = []
    for what, given in (("numbers", frame), ("texts", texts), ("objects of pandas", objects)):
        before, began = _memory_mb("VmRSS"), time.perf_counter()
        Path("/proc/self/clear_refs").write_text("5")  # the peak is counted from here on
        load(given)
        took = time.perf_counter() - began
        figures.append(_figure(f"load of a frame, 10 million rows, ids are {what}", took, 3.0, "s"))
        figures.append(
            _figure(f"the same, memory beyond the frame, {what}", _memory_mb("VmHWM") - before, 1000.0, "MB")
        )
    return figures


def own_file() -> list[Figure]:
    """`load` of a text file of `--megabytes`: every row is there, and memory stays below the file's size."""
    import numpy as np
    import polars as pl

    from homebody.data import load

    size = MEGABYTES
    if size == 0:
        return []
    draw, block, rows = np.random.default_rng(0), 200_000, 0
    words = np.array(["the", "film", "was", "long", "and", "not", "as", "good", "we", "had", "thought", "before", "it"])
    reviews = pl.Series([" ".join(some) for some in words[draw.integers(0, len(words), (1000, 9))]])
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "reviews.csv")
        with path.open("wb") as file:
            file.write(b"user_id,item_id,timestamp,rating,review\n")
            while file.tell() < size * 1_000_000:
                table = {
                    "user": draw.integers(0, 500_000, block),
                    "item": draw.zipf(1.3, block) % 100_000,
                    "time": draw.integers(1_500_000_000, 1_700_000_000, block),
                    "rating": draw.integers(1, 6, block),
                    "review": reviews.gather(draw.integers(0, 1000, block)),
                }
                pl.DataFrame(table).write_csv(file, include_header=False)
                rows += block
        began = time.perf_counter()
        people = load(path, feature_cols="")
        took, peak = time.perf_counter() - began, _memory_mb("VmHWM")
    if people.n_interactions != rows:
        raise SystemExit(f"{people.n_interactions:,} of {rows:,} rows were read.")
    name = f"load of a text file, {size:,} MB, {rows / 1e6:,.0f} million rows"
    return [_figure(name, took, None, "s"), _figure("the same, peak memory", peak, 300.0 + size, "MB")]


def _command(*arguments: str, times: int = 5) -> float:
    command = [str(Path(sys.executable).parent / "homebody"), *arguments]
    seconds = []
    for _ in range(times):
        began = time.perf_counter()
        subprocess.run(command, check=True, capture_output=True)
        seconds.append(time.perf_counter() - began)
    return sorted(seconds)[times // 2]


def ranking_ml_1m() -> list[Figure]:
    """Score and rank everyone's test item in the whole catalogue, from a trained model."""
    from homebody.data import load
    from homebody.data.partitions import leave_one_out

    small, whole = leave_one_out(load("synthetic")), leave_one_out(load("ml-1m"))
    _full_ranking(small)  # compiles
    seconds, _ = _full_ranking(whole)
    return [_figure("full ranking of 6,040 users × 3,706 items", seconds, 1.0, "s")]


def ranking_book_crossing() -> list[Figure]:
    """Everyone's last book held out, even an only one, and ranked among all."""
    import numpy as np

    from homebody.data import load
    from homebody.data.partitions import leave_one_out
    from homebody.data.splits import Split

    _full_ranking(leave_one_out(load("synthetic")))  # compiles
    books = load("book-crossing")
    start, stop = books.indptr[:-1], books.indptr[1:]
    bounds = np.stack([start, stop - 1, stop - 1, stop, stop])
    everyone = np.ones(books.n_users, dtype=np.bool_)
    rows = np.arange(books.n_interactions)
    split = Split(books, "last", "strict", "latest", 0, 99, rows=rows, bounds=bounds, learn=everyone)
    seconds, metrics = _full_ranking(split)
    name = "AUC and Recall@10 of 105,283 users × 340,556 books"
    return [
        _figure(name, seconds, 180.0, "s"),
        _figure(f"{name}, peak memory", _peak_mb(), 4000.0, "MB"),
        _figure("iALS on it, AUC", metrics["full/auc"], None, ""),
        _figure("iALS on it, Recall@10", metrics["full/recall@10"], None, ""),
    ]


def _full_ranking(split: Any) -> tuple[float, dict[str, float]]:
    import torch

    from homebody.evaluation import Block, questions, summarise
    from homebody.evaluation.protocols import SCORES_AT_ONCE
    from homebody.methods.ials import IALS

    score, everything = IALS(factors=16).trained(split.histories(), rounds=1), torch.arange(split.n_items)
    asked, size = split.asked(), max(1, SCORES_AT_ONCE // split.n_items)
    began = time.perf_counter()
    found = summarise(
        Block(users, score(users, everything), {"test": questions(split, users)["test"]})
        for users in (asked[start : start + size] for start in range(0, len(asked), size))
    )
    return time.perf_counter() - began, found.metrics


CASES: dict[str, Callable[[], list[Figure]]] = {
    "help": help_text,
    "import": import_alone,
    "frames": frames,
    "own-file": own_file,
    "data-info": data_info,
    "ranking-ml-1m": ranking_ml_1m,
    "ranking-book-crossing": ranking_book_crossing,
    "pfedrec-ml-100k": pfedrec_ml_100k,
    "fedials-ml-1m": fedials_ml_1m,
    "fedmf-million": fedmf_million,
    "privrec": privrec_ml_1m,
    "fl-mv-dssm": fl_mv_dssm_ml_100k,
    "fmf-ldp": fmf_ldp_of_the_papers_size,
    "maml": maml_against_reptile,
    "exact-noise": exact_noise,
    "news": news_rounds,
    "news-reading": news_reading,
    "news-runs": news_runs,
    "pfedrec-ml-1m": pfedrec_ml_1m,
}


def _figure(what: str, measured: float, bar: float | None, unit: str, loop: float | None = None) -> Figure:
    return {"what": what, "measured": measured, "bar": bar, "unit": unit, "loop": loop}


MEGABYTES = 5000
"""The size of the text file that `own-file` reads."""


def _memory_mb(what: str) -> float:
    """Of this process: VmRSS is what it has, VmHWM the most that it had."""
    (line,) = (line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(what))
    return int(line.split()[1]) / 1024


def _peak_mb() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def main() -> None:
    global MEGABYTES
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cases", nargs="*", metavar="CASE", help=f"any of {', '.join(CASES)}; all by default")
    parser.add_argument("--json", action="store_true", help="print one JSON object and nothing else")
    parser.add_argument(
        "--megabytes", type=int, default=MEGABYTES, help=f"size of the file of own-file ({MEGABYTES}); 0 leaves it out"
    )
    parser.add_argument("--here", metavar="CASE", help=argparse.SUPPRESS)
    given = parser.parse_args()
    MEGABYTES = given.megabytes
    if given.here:
        print(json.dumps(CASES[given.here]()))
        return
    unknown = [case for case in given.cases if case not in CASES]
    if unknown:
        parser.error(f"there is no case {unknown[0]}; cases: {', '.join(CASES)}")
    figures: list[Figure] = []
    for case in given.cases or CASES:
        print(f"{case} …", file=sys.stderr, flush=True)
        done = subprocess.run(
            [sys.executable, __file__, "--here", case, "--megabytes", str(given.megabytes)],
            stdout=subprocess.PIPE,
            text=True,
            check=False,
        )
        if done.returncode:
            print(f"{case} failed; see above.", file=sys.stderr)
            figures.append(_figure(f"{case}: failed", float("nan"), None, ""))
        else:
            figures += json.loads(done.stdout.splitlines()[-1])
    if given.json:
        print(json.dumps({"figures": figures}))
        return
    _print(figures)


def _print(figures: list[Figure]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(title="measured on this machine; no figure is asserted in a test")
    for heading in ("figure", "measured", "bar", "met", "per-client loop", "faster"):
        table.add_column(heading, justify="left" if heading == "figure" else "right")
    for figure in figures:
        unit, measured, bar, loop = figure["unit"], figure["measured"], figure["bar"], figure["loop"]
        table.add_row(
            figure["what"],
            f"{measured:,.3g} {unit}" if unit != "MB" else f"{measured:,.0f} MB",
            "" if bar is None else f"≤ {bar:,.6g} {unit}",
            "" if bar is None else "yes" if measured <= bar else "NO",
            "" if loop is None else f"{loop:,.3g} s",
            "" if loop is None else f"{loop / measured:,.0f} ×",
        )
    Console(width=140).print(table)


if __name__ == "__main__":
    main()
