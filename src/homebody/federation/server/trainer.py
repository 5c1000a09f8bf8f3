"""The process that trains: `fit` over real devices, from its last checkpoint, until the rounds are done.

It holds nothing that its database does not: killed at any moment, it is started again by its supervisor and goes on.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch

from homebody.core import Method
from homebody.database import connect
from homebody.errors import Abandoned, HomebodyError, Unavailable
from homebody.evaluation import describe
from homebody.federation.flower.link import Link
from homebody.federation.flower.protocol import LinkDown, Refused
from homebody.federation.schema import FeatureSchema
from homebody.federation.server.epochs import Epochs
from homebody.federation.server.helper import HelperClient
from homebody.federation.server.monitor import Monitor
from homebody.federation.server.plan import ServerPlan, opened
from homebody.federation.server.records import Records
from homebody.federation.server.runtime import Flower
from homebody.federation.service.logs import follow_parent, log
from homebody.progress import Progress, Round
from homebody.report.record import Result, jsonable
from homebody.report.words import measured
from homebody.run_notes import result_of
from homebody.training import Trained, fit, reopened

__all__ = ["AGAIN", "LATER", "main", "train"]

AGAIN = 75
"""The exit code that says: nothing is wrong here, start me again."""
LATER = 76
"""The same, but not at once: too few devices answer, and every attempt is charged."""
LOOK_SECONDS = 2.0
"""Between looks for devices that do not have the finished model yet."""


def train(folder: Path, *, once: bool = False) -> Result:
    """Train to the end of the plan; then give the model to whoever comes, unless `once`. Return the outcome."""
    plan = ServerPlan.read(folder)
    method = plan.method()
    records = Records(connect(plan.database_in(folder), what="server's database"))
    if records.n_items() < 2:
        raise HomebodyError("The catalogue has fewer than 2 items: add some with `homebody server items`.")
    secret = (folder / "keys" / "secret").read_bytes().strip()
    ca = (folder / "keys" / "ca.pem").read_bytes() if plan.tls else None
    records.note("trouble", "")
    progress = records.load()  # takes rounds back that are run again, before anybody is told of them
    # The round that devices must still be able to come back to.
    keep = progress.best.step if progress is not None and progress.best is not None else None
    with Link(plan.address, ca=ca, secret=secret) as link, Monitor(plan, folder):
        link.open()
        log("started", run=plan.run[:8], method=plan.recipe.method, items=records.n_items())
        epochs = Epochs(records, folder) if plan.reports else None
        content = records.features()
        schema = None if content is None else FeatureSchema.read(content)
        helper = HelperClient.of(folder, plan.helper) if plan.helper else None
        runtime = Flower(link, records, plan, keep=keep, epochs=epochs, helper=helper, schema=schema, log=log)
        # Once training has ended nobody is waited for: the model is there for whoever comes.
        if progress is not None and (ended := _outcome(plan, method, records, progress)) is not None:
            fitted, result = _reopened(plan, method, runtime, records, progress, ended), ended
        else:
            fitted = _fit(plan, method, runtime, records)
            result = _result(plan, method, fitted, records, folder)
            records.note("result", json.dumps(jsonable(result)))
        records.note("doing", "finished" if once else "serving the finished model")
        log("finished", rounds=result["rounds"], chosen=result["chosen_round"], stopped=fitted.stopped)
        served = runtime.publish(method, fitted.shared, fitted.chosen, set())
        if sys.stdout.isatty() or once:
            from homebody.report.terminal import print_result

            print_result(jsonable(result))
        while not once:
            time.sleep(LOOK_SECONDS)
            served = runtime.publish(method, fitted.shared, fitted.chosen, served)
    return result


def _outcome(plan: ServerPlan, method: Method, records: Records, progress: Progress) -> Result | None:
    """The outcome of the training if it ended with this round; None if rounds are left, as after the plan got more of
    them, or another budget."""
    result: Result | None = json.loads(records.notes().get("result", "null"))
    if result is None or result["rounds"] != progress.step:
        return None
    if result["stopped"]:
        return result if result["budget"] == plan.recipe.budget else None
    return result if progress.step >= plan.planned(method) else None


def _reopened(
    plan: ServerPlan, method: Method, runtime: Flower, records: Records, progress: Progress, ended: Result
) -> Trained:
    recipe = plan.recipe
    return reopened(
        method,
        runtime,
        progress,
        rounds=recipe.rounds or method.about.rounds,
        seed=recipe.seed,
        ledger=records.ledger(),
        delta=recipe.stated_at,
        stopped=ended["stopped"],
    )


def _fit(plan: ServerPlan, method: Method, runtime: Flower, records: Records) -> Trained:
    recipe = plan.recipe
    rounds, select = recipe.rounds or method.about.rounds, recipe.selects()

    def on_round(line: Round) -> None:
        records.add_round(line)
        records.note("doing", f"round {line.step} of {plan.planned(method)} is done")
        facts: dict[str, Any] = {"bytes_up": line.bytes_up, "bytes_down": line.bytes_down}
        facts["epsilon"] = {observer: jsonable(value) for observer, value in line.epsilon.items()}
        if select in line.metrics:
            facts["measured"] = measured({select: line.metrics[select]}, line.errors)
        log("round", round=line.step, clients=line.clients, seconds=round(line.seconds, 3), **facts)

    return fit(
        method,
        runtime,
        rounds=rounds,
        cohort=recipe.cohort,
        seed=recipe.seed,
        ledger=records.ledger(),
        budget=recipe.allowed(),
        delta=recipe.stated_at,
        evaluate_every=recipe.every(method),
        select=select,
        on_round=on_round,
        checkpoints=records,
    )


def _result(plan: ServerPlan, method: Method, fitted: Trained, records: Records, folder: Path) -> Result:
    recipe = plan.recipe
    result = result_of(
        recipe,
        method,
        records.rounds(),
        fitted.evaluated,
        fitted.epsilon,
        data="devices",
        meaning=describe(recipe.protocol, recipe.held_out or "latest", recipe.negatives, recipe.split),
        chosen=fitted.chosen,
        stopped=fitted.stopped,
        notes=recipe.unshuffled(),
        run=folder,
    )
    result["errors"], result["unclipped"] = fitted.evaluated.errors, fitted.evaluated.unclipped
    return result


@contextmanager
def _noting_trouble(folder: Path) -> Iterator[None]:
    """Write down why the process ended, for whoever asks the server how it does."""
    try:
        yield
    except HomebodyError as error:
        if not isinstance(error, Unavailable):
            with suppress(HomebodyError), opened(folder) as (_, records):
                records.note("trouble", str(error))
        raise


def main(given: list[str] | None = None) -> None:
    """The process. Exit code 2: something a person must put right; 75: start it again."""
    parser = argparse.ArgumentParser("homebody.federation.server.trainer", description="Train over real devices.")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--once", action="store_true", help="End when the training does.")
    parser.add_argument("--follow-parent", action="store_true", help="End when standard input does.")
    asked = parser.parse_args(given)
    if asked.follow_parent:
        follow_parent(lambda: os._exit(AGAIN))
    os.umask(0o077)
    torch.set_num_threads(max(1, (os.cpu_count() or 2) // 2))
    try:
        with _noting_trouble(asked.folder):
            train(asked.folder, once=asked.once)
    except (LinkDown, Refused) as error:
        log("link lost", reason=str(error)[:200])
        sys.exit(AGAIN)
    except Abandoned as error:
        log("too few answer", reason=str(error))
        sys.exit(LATER)
    except Unavailable as error:
        log("interrupted", reason=str(error))
        sys.exit(AGAIN)
    except HomebodyError as error:
        log("stopped", reason=str(error))
        sys.stderr.write(f"homebody: {error}\n")
        sys.exit(2)


if __name__ == "__main__":
    main()
