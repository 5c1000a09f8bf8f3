"""What a person is told about secure sums: on whose noise their ε rests."""

from __future__ import annotations

from pathlib import Path

import pytest
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

from homebody.federation.device.disclosures import disclosure
from homebody.federation.device.home import Home
from homebody.privacy import Charge, SkellamRelease
from homebody.privacy.assumptions import OWN_NOISE
from homebody.privacy.mechanisms import BETWEEN_PARTIES
from homebody.privacy.secure_sum import SEMI_HONEST

SIGNER = ec.derive_private_key(7, ec.SECP384R1()).public_key().public_bytes(Encoding.OpenSSH, PublicFormat.OpenSSH)


@pytest.mark.parametrize(("key", "said"), [("", OWN_NOISE), (SIGNER.decode(), BETWEEN_PARTIES)])
def test_a_ledger_says_on_whose_noise_it_counts(tmp_path: Path, key: str, said: str) -> None:
    with Home.create(tmp_path / "device", server="127.0.0.1:9092", roster_key=key) as home:
        home.people.add("ann")
        home.ledger("ann").charge("train/1", [Charge("server", "user", SkellamRelease(2.0, 8192, 0))])
        notes = {note for row in disclosure(home, "ann")["certified"] for note in row["notes"]}
    assert notes & {OWN_NOISE, BETWEEN_PARTIES} == {said}
    assert (SEMI_HONEST in notes) == bool(key)
