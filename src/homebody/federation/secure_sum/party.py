"""A device's side of a secure sum (Bonawitz et al. 2017, with the check against a server that lies).

| in the paper | here |
|---|---|
| c_u, s_u | `_Secrets.seal`, `_Secrets.mask` |
| b_u | `_Secrets.own_seed`, the seed of the mask that is a party's alone |
| U₁, U₂, U₃ | the list of parties; the senders of shares; the survivors |
| t | `Terms.quorum`; for shares `Design.threshold`, which is the same where everyone masks with everyone |
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Container
from dataclasses import dataclass
from functools import partial
from typing import Literal, NamedTuple

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey
from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305

from homebody.errors import HomebodyError, several
from homebody.federation.secure_sum.masks import KEY_BYTES, MaskedSum, agree, derive, public_half, round_key, stream
from homebody.federation.secure_sum.messages import (
    COUNT,
    EXCHANGES,
    FEWEST,
    IDENTITY_BYTES,
    OPENED,
    SEALED,
    SIGNED,
    BadMessage,
    Exchange,
    Listing,
    Terms,
    Unpacker,
    blob,
    commitment,
    numbers_of,
)
from homebody.federation.secure_sum.shamir import PRIME, SHARE_BYTES, bytes_to_draw, coefficients, split
from homebody.federation.secure_sum.signatures import identity_of, sign, verify
from homebody.privacy.ring import Numbers

__all__ = ["Party"]

_NONCE = bytes(12)
"""The nonce of sealed shares: each key is used for one message only."""
_STATE = b"HBP1"


class _Secrets(NamedTuple):
    seal: bytes
    mask: bytes
    own_seed: bytes
    drawn: bytes
    """The key that random coefficients are drawn with."""


@dataclass(frozen=True)
class _Answered:
    """An exchange that was answered: the same question gets the same answer, another is refused."""

    digest: bytes
    question: bytes
    """What was asked, until secrets are forgotten."""
    answer: bytes


class Party:
    """One device in one attempt at a secure sum: from the server's question in each exchange to the answer.

    A question that breaks the protocol raises `BadMessage` and changes nothing. The same question again gives the same
    bytes; another question in an exchange that is answered is refused. Store `state` before an answer leaves: it holds
    the secrets of the round, until the last exchange or `forget` removes them.

    fewest: with fewer parties this device does not take part. known: the identities of devices that may be parties
    (a roster); None: whoever the server names.

    >>> from homebody.federation.secure_sum.collector import Collector, talk
    >>> import numpy as np
    >>> keys = [ec.generate_private_key(ec.SECP384R1()) for _ in range(3)]
    >>> terms = Terms("run", "round 1", parties=3, entries=2, width=2)
    >>> parties = [Party.join(terms, number, key) for number, key in enumerate(keys)]
    >>> talking = talk(Collector(terms, {party.number: party.identity for party in parties}))
    >>> vectors = np.array([[1, 2], [10, 20], [100, 65535]], dtype=np.uint64)
    >>> asked = next(talking)
    >>> try:
    ...     while True:
    ...         asked = talking.send(
    ...             [(n, parties[n].answer(asked.exchange, asked.question(n), lambda: vectors[n])) for n in asked.own]
    ...         )
    ... except StopIteration as ended:
    ...     print(ended.value.numbers.tolist(), ended.value.survivors)
    [111, 21] (0, 1, 2)
    """

    def __init__(
        self,
        terms: Terms,
        number: int,
        key: ec.EllipticCurvePrivateKey,
        seed: bytes | None,
        answered: dict[Exchange, _Answered],
        *,
        fewest: int,
        known: Container[bytes] | None,
    ) -> None:
        if terms.parties < fewest:
            raise BadMessage(
                f"A secure sum of {several(terms.parties, 'party', 'parties')} is refused: this device takes part "
                f"among {fewest:,} or more."
            )
        if not 0 <= number < 1 << 32:
            raise HomebodyError(f"A party's number has 32 bits, and {number} does not fit.")
        self.terms, self.number, self.identity = terms, number, identity_of(key.public_key())
        self._key, self._seed, self._answered = key, seed, answered
        self._fewest, self._known = fewest, known
        self._round_keys: dict[str, X25519PrivateKey] = {}
        self._agreed: dict[tuple[str, int], bytes] = {}

    @classmethod
    def join(
        cls,
        terms: Terms,
        number: int,
        key: ec.EllipticCurvePrivateKey,
        *,
        fewest: int = FEWEST,
        known: Container[bytes] | None = None,
        seed: bytes | None = None,
    ) -> Party:
        """Take part as this number. seed: 32 secret random bytes that are used for nothing else, by default drawn."""
        seed = os.urandom(KEY_BYTES) if seed is None else seed
        return cls(terms, number, key, seed, {}, fewest=fewest, known=known)

    def answer(self, exchange: Exchange, question: bytes, vector: Callable[[], Numbers] | None = None) -> bytes:
        """The answer in any exchange; `vector` is asked for in 'masked' alone: once, after the question is checked, and
        never again, since noise in it must be drawn once. This party signs one set of survivors. With the last exchange
        the secrets of the round are forgotten."""
        works: dict[Exchange, Callable[[_Secrets, bytes], bytes]] = {
            "keys": self._keys,
            "shares": self._shares,
            "masked": partial(self._masked, vector=vector),
            "survivors": self._survivors,
            "open": self._open,
        }
        if exchange not in works:
            raise BadMessage(f"A secure sum has no exchange '{exchange}'.")
        digest = hashlib.sha256(question).digest()
        if (known := self._answered.get(exchange)) is not None:
            if known.digest != digest:
                raise BadMessage(
                    f"This device has answered '{exchange}' of this attempt already, to another question: it answers "
                    "one only."
                )
            return known.answer
        if self._seed is None:
            raise BadMessage("This device has forgotten the secrets of this attempt: begin another.")
        place = len(self._answered)
        if EXCHANGES[place] != exchange:
            raise BadMessage(f"'{exchange}' is asked for before '{EXCHANGES[place]}' was answered.")
        content = works[exchange](self._secrets(self._seed), question)
        listed = b"" if exchange == "keys" else self._listing(question).digest
        answer = sign(self._key, self.terms, listed, exchange, self.number, content)
        self._answered[exchange] = _Answered(digest, question, answer)
        if exchange == "open":
            self.forget()
        return answer

    def forget(self) -> None:
        """Remove the secrets of the round. Only questions that were answered are answered again."""
        self._seed = None
        self._round_keys.clear()
        self._agreed.clear()
        self._answered = {
            exchange: _Answered(known.digest, b"", known.answer) for exchange, known in self._answered.items()
        }

    def state(self) -> bytes:
        """All that `of_state` needs, but for the device's key. It is secret until the round is over."""
        records = [
            bytes([EXCHANGES.index(exchange)]) + known.digest + blob(known.question) + blob(known.answer)
            for exchange, known in self._answered.items()
        ]
        head = [_STATE, blob(self.terms.encode()), COUNT.pack(self.number), self.identity, blob(self._seed or b"")]
        return b"".join([*head, bytes([len(records)]), *records])

    @classmethod
    def of_state(
        cls,
        state: bytes,
        key: ec.EllipticCurvePrivateKey,
        *,
        fewest: int = FEWEST,
        known: Container[bytes] | None = None,
    ) -> Party:
        """The party as it was; `key` is the device's, as before."""
        cursor = Unpacker(state, "The stored state of a secure sum")
        if cursor.take(4) != _STATE:
            raise BadMessage("This is no stored state of a party in a secure sum.")
        terms, number = Terms.decode(cursor.blob()), cursor.number()
        identity, seed = cursor.take(IDENTITY_BYTES), cursor.blob()
        answered: dict[Exchange, _Answered] = {}
        for place in range(cursor.take(1)[0]):
            if cursor.take(1)[0] != place or place >= len(EXCHANGES):
                raise BadMessage("The stored state of a secure sum has exchanges out of order.")
            answered[EXCHANGES[place]] = _Answered(cursor.take(32), cursor.blob(), cursor.blob())
        cursor.end()
        if len(seed) not in (0, KEY_BYTES):
            raise BadMessage("The stored state of a secure sum has a seed of another length.")
        if identity != identity_of(key.public_key()):
            raise HomebodyError("The stored state of a secure sum is another device's: its key is not this one.")
        return cls(terms, number, key, seed or None, answered, fewest=fewest, known=known)

    def _secrets(self, seed: bytes) -> _Secrets:
        names = ("seal", "mask", "own", "coefficients")
        return _Secrets(*(derive(seed, self.terms.digest, name, self.number, self.number) for name in names))

    def _listing(self, question: bytes = b"") -> Listing:
        known = self._answered.get("shares")
        return Listing.read(self.terms, known.question if known else question)[0]

    def _keys(self, secrets: _Secrets, question: bytes) -> bytes:
        if question:
            raise BadMessage("The question for round keys is not empty.")
        return public_half(secrets.seal) + public_half(secrets.mask)

    def _shares(self, secrets: _Secrets, question: bytes) -> bytes:
        """Shares of both secrets, sealed to each neighbour; checks who takes part."""
        listing, rest = Listing.read(self.terms, question)
        self._check_parties(secrets, listing, rest)
        graph = listing.graph
        holders, drawn = graph.holders(self.number), bytes_to_draw(graph.design.threshold)
        random = stream(secrets.drawn, 2 * drawn)
        key_shares = split(secrets.mask, coefficients(random[:drawn]), holders.values())
        seed_shares = split(secrets.own_seed, coefficients(random[drawn:]), holders.values())
        rows = [commitment(self.terms.digest, self.number, secrets.own_seed)]
        for holder, *pair in zip(holders, key_shares, seed_shares, strict=True):
            if holder != self.number:
                plain = b"".join(share.to_bytes(SHARE_BYTES, "little") for share in pair)
                box = self._cipher(secrets, listing, self.number, holder).encrypt(_NONCE, plain, None)
                rows.append(SEALED.pack(holder, box))
        return b"".join(rows)

    def _check_parties(self, secrets: _Secrets, listing: Listing, rest: bytes) -> None:
        if len(listing.devices) < self._fewest:
            raise BadMessage(
                f"The list names {several(len(listing.devices), 'party', 'parties')}: this device takes part among "
                f"{self._fewest:,} or more."
            )
        given = (self.identity, public_half(secrets.seal), public_half(secrets.mask))
        if given != tuple(part.get(self.number) for part in (listing.devices, listing.seal, listing.mask)):
            raise BadMessage("The list does not name this device with the round keys that it gave.")
        self._check_roster(listing)
        signatures = dict(SIGNED.unpack(rest, "signatures of round keys"))
        neighbours = listing.graph.neighbours(self.number)
        if tuple(signatures) != neighbours:
            raise BadMessage("There is not a signature of the round keys of each neighbour, and of nobody else.")
        for number in neighbours:
            digest = hashlib.sha256(listing.seal[number] + listing.mask[number]).digest()
            if not verify(signatures[number], listing.devices[number], self.terms, b"", "keys", number, digest):
                raise BadMessage(f"The round keys of party {number} are not signed by its device for this attempt.")

    def _check_roster(self, listing: Listing) -> None:
        if self._known is not None:
            for number, device in listing.devices.items():
                if device not in self._known:
                    raise BadMessage(f"Party {number} of the list is a device that the roster does not have.")

    def _masked(self, secrets: _Secrets, question: bytes, vector: Callable[[], Numbers] | None) -> bytes:
        assert vector is not None
        listing = self._listing()
        self._check_roster(listing)  # again: the device may have got one since, and counts on these parties now
        neighbours, threshold = set(listing.graph.neighbours(self.number)), listing.graph.design.threshold
        senders = [number for number, _ in SEALED.unpack(question, "sealed shares")]
        if not neighbours.issuperset(senders):
            raise BadMessage("There are shares of a party that is no neighbour of this one.")
        if len(senders) + 1 < threshold:
            raise BadMessage(
                f"{several(len(senders), 'neighbour')} sent shares, and {threshold - 1:,} must: with so few the mask "
                "could be taken off."
            )
        numbers = vector()
        if numbers.shape != (self.terms.entries,):
            raise HomebodyError(
                f"A vector of {numbers.size:,} numbers does not fit a secure sum of {self.terms.entries:,}."
            )
        total = MaskedSum(self.terms.entries, self.terms.width)
        total.add_numbers(numbers)
        total.add(derive(secrets.own_seed, self.terms.digest, "own mask", self.number, self.number))
        for other in senders:
            low, high = min(self.number, other), max(self.number, other)
            key = derive(self._agree(secrets, listing, "mask", other), self.terms.digest, "mask", low, high)
            (total.add if self.number == low else total.subtract)(key)
        return total.packed()

    def _survivors(self, _: _Secrets, question: bytes) -> bytes:
        survivors, listing = set(numbers_of(question, "survivors")), self._listing()
        if self.number not in survivors:
            raise BadMessage("The survivors do not include this device, which gave its vector.")
        if not survivors.issubset(listing.devices):
            raise BadMessage("A survivor is no party of this attempt.")
        if len(survivors) < max(self.terms.quorum, self._fewest):
            raise BadMessage(
                f"{several(len(survivors), 'party survives', 'parties survive')}: {self.terms.quorum:,} of "
                f"{self.terms.parties:,} must, and {self._fewest:,} at least."
            )
        neighbours = survivors.intersection(listing.graph.neighbours(self.number))
        if not neighbours.issubset(dict(self._boxes())):
            raise BadMessage("A neighbour survives whose shares did not come.")
        if len(neighbours) + 1 < listing.graph.design.threshold:
            raise BadMessage("Too few neighbours of this device survive: their shares would not open the sum.")
        return hashlib.sha256(question).digest()

    def _open(self, secrets: _Secrets, question: bytes) -> bytes:
        """A share of one secret of each neighbour and of one's own, against enough signatures of the survivors. Of
        survivors, a share of the mask that is theirs alone; of the others, of the key that they mask with."""
        listing, known = self._listing(), self._answered["survivors"]
        survivors = set(numbers_of(known.question, "survivors"))
        signatures = dict(SIGNED.unpack(question, "signatures of the survivors"))
        if not survivors.issuperset(signatures):
            raise BadMessage("A signature of the survivors is by a party that is not one of them.")
        if len(signatures) < self.terms.quorum:
            raise BadMessage(
                f"{several(len(signatures), 'party has', 'parties have')} signed the survivors, and "
                f"{self.terms.quorum:,} must before anything opens."
            )
        content = hashlib.sha256(known.digest).digest()
        for number, signature in signatures.items():
            device = listing.devices[number]
            if not verify(signature, device, self.terms, listing.digest, "survivors", number, content):
                raise BadMessage(f"Party {number} has not signed the same survivors as this device.")
        rows = {number: self._held(secrets, listing, number, box) for number, box in self._boxes()}
        rows[self.number] = self._own_shares(secrets, listing)
        return b"".join(
            OPENED.pack(number, bytes([number in survivors]), pair[number in survivors])
            for number, pair in sorted(rows.items())
            if pair is not None
        )

    def _boxes(self) -> list[tuple[int, bytes]]:
        return SEALED.unpack(self._answered["masked"].question, "sealed shares")

    def _held(self, secrets: _Secrets, listing: Listing, sender: int, box: bytes) -> tuple[bytes, bytes] | None:
        """Shares of the two secrets of this neighbour; None if they cannot be unsealed: then others must suffice."""
        try:
            plain = self._cipher(secrets, listing, sender, self.number).decrypt(_NONCE, box, None)
        except InvalidTag:
            return None
        pair = plain[:SHARE_BYTES], plain[SHARE_BYTES:]
        return None if any(int.from_bytes(share, "little") >= PRIME for share in pair) else pair

    def _own_shares(self, secrets: _Secrets, listing: Listing) -> tuple[bytes, bytes]:
        """The share that this party has of its own secrets. It survives, so the first is never asked for."""
        graph = listing.graph
        drawn = bytes_to_draw(graph.design.threshold)
        random = stream(secrets.drawn, 2 * drawn)[drawn:]
        (share,) = split(secrets.own_seed, coefficients(random), [graph.holders(self.number)[self.number]])
        return b"", share.to_bytes(SHARE_BYTES, "little")

    def _cipher(self, secrets: _Secrets, listing: Listing, sender: int, receiver: int) -> ChaCha20Poly1305:
        other = receiver if sender == self.number else sender
        agreed = self._agree(secrets, listing, "seal", other)
        return ChaCha20Poly1305(derive(agreed, self.terms.digest, "shares", sender, receiver))

    def _agree(self, secrets: _Secrets, listing: Listing, kind: Literal["seal", "mask"], other: int) -> bytes:
        if kind not in self._round_keys:
            self._round_keys[kind] = round_key(getattr(secrets, kind))
        if (kind, other) not in self._agreed:
            agreed = agree(self._round_keys[kind], getattr(listing, kind)[other])
            if agreed is None:
                raise BadMessage(f"A round key of party {other} is of no use: leave that party out.")
            self._agreed[kind, other] = agreed
        return self._agreed[kind, other]
