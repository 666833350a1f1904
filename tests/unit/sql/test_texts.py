"""Texts of sources and episodes in SQL: any script, and none."""

from __future__ import annotations

import json
from pathlib import Path

import expstore
from tests.support.arrow_bodies import batch_of


def test_texts_of_episodes_come_back_in_any_script(tmp_path: Path) -> None:
    facts = [{"site": "Größe 北京"}, None, {"site": "é"}, {"site": "lab"}]
    with expstore.open(tmp_path / "a.exp") as rb:
        for number, info in enumerate(facts):
            rb.extend(batch_of(10, 10 * number), source=f"Quelle-ß{number}", episode_info=info)
        for reader in (rb, expstore.open(tmp_path / "a.exp", mode="r")):
            rb.flush()
            found = reader.sql("SELECT source, info FROM episodes ORDER BY episode_id").fetchall()
            assert [name for name, _ in found] == [f"Quelle-ß{number}" for number in range(4)]
            assert [
                {"site": json.loads(text)["site"]} if text and "site" in text else None for _, text in found
            ] == facts
        reader.close()
