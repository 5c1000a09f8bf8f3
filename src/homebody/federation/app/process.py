"""The process of an app: reach the device, answer its questions, and come back after any failure.

An app reads its own features, the item tower, its own tower and the samples. It sends its raw gradient to the device,
which clips it: the device does not rely on an app to do so.
"""

from __future__ import annotations

import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from homebody.core import Catalogue, Cohort, Column, Data, Method, Tree, releases
from homebody.errors import HomebodyError
from homebody.federation import wire
from homebody.federation.app.checks import check_finite, check_samples, check_towers
from homebody.federation.app.folder import AppFolder, SeenQuestion
from homebody.federation.schema import FeatureSchema
from homebody.federation.service.logs import log
from homebody.federation.task import acting
from homebody.federation.views import (
    HELLO_BYTES,
    QUESTION_BYTES,
    AppQuestion,
    Vanished,
    hello,
    hide_memory,
    peer_user,
    receive,
    send,
    views_of,
)
from homebody.files import holding
from homebody.methods.fl_mv_dssm import FLMVDSSM
from homebody.models.towers import input_width, inputs, row_count
from homebody.privacy import Channel
from homebody.rng import Rng

__all__ = ["App", "take_part"]

FIRST_PAUSE, LONGEST_PAUSE = 0.1, 2.0
"""Seconds before a device that is away is tried again."""
SEND_SECONDS = 30.0


def take_part(path: Path) -> None:
    """Answer the device until a signal stops the process."""
    os.umask(0o077)
    hide_memory()
    torch.set_num_threads(1)
    stop = threading.Event()

    def end(*_: object) -> None:
        stop.set()
        raise _Stopped

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, end)
    busy = f"The app in {path} is running already; stop it first."
    try:
        with AppFolder(path) as folder, holding(path / ".lock", busy):
            compile_kernels()
            App(folder, log).run(stop)
    except _Stopped:
        return


def compile_kernels() -> None:
    """Work for one toy person, so that no round waits for compilation."""
    method, rng = FLMVDSSM(widths="2,2", batch_size=1), Rng.of(0)
    tags = Column(torch.ones(3, 1, dtype=torch.int64), 2, "many")
    catalogue = Catalogue(3, {"tags": tags}, {"toy": Column(torch.zeros(0), 1, "number", view="toy")})
    first = torch.zeros(1, dtype=torch.int64)
    data = Data(first, first == 0, first, catalogue, {"toy": torch.tensor(1.0)})
    shared = method.init_shared(catalogue, rng)
    method.view("toy", shared, {}, method.prepare(data, rng))
    method.probabilities(shared, {}, data)


class _Stopped(Exception):
    """The process was told to end."""


class App:
    """Answers a device's questions from what an app's folder holds."""

    def __init__(self, folder: AppFolder, log: Callable[..., None] = lambda event, **facts: None) -> None:
        self.folder, self._log = folder, log
        self._methods: dict[str, Method] = {}
        self._noted: set[str] = set()

    def run(self, stop: threading.Event) -> None:
        """Be there for the device, and come back whenever the connection breaks."""
        pause, why = FIRST_PAUSE, ""
        while not stop.is_set():
            try:
                with self._joined() as connection:
                    self._log("joined", view=self.folder.settings.view)
                    pause, why = FIRST_PAUSE, ""
                    while not stop.is_set():
                        letter = receive(connection, QUESTION_BYTES, None)
                        send(connection, self.answer(letter), SEND_SECONDS)
            except (OSError, wire.Malformed, _Refused) as error:
                reason = str(error) if isinstance(error, wire.Malformed | _Refused | Vanished) else "It is not there."
                if reason != why:  # said once, not every time
                    self._log("away", reason=reason)
                    why = reason
                stop.wait(pause)
                pause = min(2 * pause, LONGEST_PAUSE)

    def _joined(self) -> socket.socket:
        """A connection to the device, which has accepted this app."""
        settings = self.folder.settings
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            connection.connect(settings.socket)
            if peer_user(connection) != settings.device_user:
                raise _Refused("A process of another user listens at the device's socket: this app does not answer it.")
            with suppress(Vanished):  # a device that does not know this user refuses before it reads
                send(connection, hello(settings.view, settings.token), SEND_SECONDS)
            header, _ = wire.decode_letter(receive(connection, HELLO_BYTES, SEND_SECONDS))
            if header.get("welcome") is not True:
                raise _Refused(str(header.get("refused", "The device refused this app."))[:300])
        except BaseException:
            connection.close()
            raise
        return connection

    def answer(self, letter: bytes) -> bytes:
        """The letter to send back; a refusal says why."""
        try:
            question = AppQuestion.read(letter)
            view = self.folder.settings.view
            if question.view != view:
                raise wire.Malformed(f"This is the app of the view '{view}'.")
            update = self._answer(question)
            reply = wire.encode_letter({"to": wire.digest(letter)}, {"update": wire.encode_tree(update)})
            sizes = (_items(question.batch), len(letter), len(reply), int(time.time()))
            seen = SeenQuestion(question.run, question.release, question.do, *sizes)
            self.folder.note(question.person, f"{question.do} {question.ask}", seen)
        except Exception as error:  # a question must not end the process
            known = isinstance(error, HomebodyError | wire.Malformed)
            reason = str(error) if known else f"The question cannot be worked on ({type(error).__name__})."
            self._log("refused", reason=reason)
            return wire.encode_letter({"to": wire.digest(letter), "refused": reason[:300]})
        self._log("answered", do=question.do, release=question.release, bytes=len(reply))
        return reply

    def _answer(self, question: AppQuestion) -> Tree:
        method = self._method(question)
        views = views_of(method)
        if views is None:
            raise wire.Malformed(f"{question.method} is no method for views.")
        name, person, run = question.view, question.person, question.run
        training = question.do == "gradient"
        local = self.folder.tower(person, run, question.step if training else question.step + 1)
        local = method.init_local(question.shared, Rng.of(0)) if local is None else local
        known = {  # the server's model calls the column `1` of the view `taste` `taste.1`
            column if column in question.schema.people else f"{name}.{column}": value
            for column, value in self.folder.features(person).items()
        }
        for reason in _ignored(known, question.schema):
            if reason not in self._noted:  # said once, not every round
                self._noted.add(reason)
                self._log("feature ignored", reason=reason)
        coded = question.schema.encoded([known], question.n_items)["users"]
        features = {column: torch.from_numpy(codes.values)[0] for column, codes in coded.columns.items()}
        catalogue = question.schema.catalogue(question.n_items)
        columns = {column: catalogue.people[column] for column in catalogue.views.get(name, ())}
        rows = None if training else row_count(views.items(catalogue))
        check_towers(question.shared, views.tower, name, input_width(list(columns.values())), rows)
        if not training:
            nothing = torch.zeros(0, dtype=torch.int64)
            data = Data(nothing, nothing.bool(), nothing, catalogue, features)
            return {
                "scores": replace(views, views=name, uplink=Channel()).probabilities(question.shared, local, data)[name]
            }
        check_samples(question.batch, len(question.shared["item/first"]))
        self._charge(method, question)
        batch = {**question.batch, f"{name}/input": inputs(columns, features)}
        gradient = views.view(name, question.shared, local, batch)
        check_finite(gradient, "The gradients of this question")
        if local:
            self.folder.put_tower(person, run, question.step, views.stepped(name, local, gradient), question.keep)
        if question.ranks and (dropped := self.folder.drop_towers({run, question.ranks})):
            self._log("dropped towers of old runs", towers=dropped)
        return {part: value for part, value in gradient.items() if part in question.parts}

    def _charge(self, method: Method, question: AppQuestion) -> None:
        """Charge what a round tells this app of the other views, before the app uses it.

        A question that comes again is the same release, whatever the device ranks with by then.
        """
        cohort = Cohort(np.zeros(1, dtype=np.int64), "all", 1, 1, question.n_items)
        charges = [charge for charge in releases(method, cohort) if charge.observer == "views"]
        release = f"{question.run}/{question.release}@{question.ask}"
        if charges:
            digest = wire.digest(replace(question, ranks="").content())
            self.folder.ledger(question.person).charge(release, charges, repeat=True, digest=digest)

    def _method(self, question: AppQuestion) -> Method:
        about = f"{question.method} {question.fields} {question.stages} {question.phase}"
        if about not in self._methods:
            described = {"method": question.method, "fields": question.fields, "stages": question.stages}
            self._methods = {about: acting(described, question.phase)}
        return self._methods[about]


class _Refused(Exception):
    """The device does not take this app, or is not the device."""


def _ignored(known: Mapping[str, str], schema: FeatureSchema) -> list[str]:
    """Why features of a person are not read. A log is no place for their values."""
    reasons = []
    for name, value in known.items():
        if (code := schema.people.get(name)) is None:
            reasons.append(f"The server's model has no feature '{name}': what is imported of it is not read.")
            continue
        try:
            _, unknown = code.of(name, value)
        except HomebodyError:
            reasons.append(
                f"'{name}' is a number in the server's model, and somebody's value is not: it counts as unknown until "
                "`homebody view import` gives a number."
            )
            continue
        if unknown:
            reasons.append(f"Somebody's value of '{name}' is one that the server's model does not know: it is ignored.")
    return reasons


def _items(batch: Any) -> int:
    """How many items of the person stand among the samples."""
    real = batch.get("real")
    return int(real[:, 0].sum()) if isinstance(real, Tensor) and real.dim() == 2 else 0
