"""The dashboard asks for nothing that the server does not tell."""

from __future__ import annotations

import json
import re
from pathlib import Path

from treadle.metrics.gauges import CacheGauge, Gauges, MemoryGauge
from treadle.metrics.prometheus import Exporter
from treadle.metrics.recorder import Recorder
from treadle.metrics.snapshot import ModelFacts
from treadle.metrics.stats import EngineFacts, reading

DASHBOARD = Path(__file__).parents[2] / "docs" / "grafana.json"


def told() -> set[str]:
    """The names of all samples of a server that has seen everything once."""
    recorder = Recorder()
    recorder.measured(
        Gauges(memory=MemoryGauge(1, 1, 1, 1), cache=CacheGauge(1, 1, None, {"exact": 1}, {"idle": 1}, {"idle": 1}))
    )
    recorder.answered("/health", 200)
    engine = EngineFacts("ready", None, 0, 0, [ModelFacts("m", "ready")])
    recorder._counters.of("m")
    text = Exporter(lambda: reading(recorder, engine)).text("application/openmetrics-text")[0].decode()
    return set(re.findall(r"^(treadle_\w+)", text, re.MULTILINE))


def test_every_query_names_samples_that_exist() -> None:
    asked = set(re.findall(r"\btreadle_\w+", DASHBOARD.read_text(encoding="utf-8")))
    assert len(asked) > 20
    assert asked <= told()


def test_every_panel_has_its_place() -> None:
    panels = json.loads(DASHBOARD.read_text(encoding="utf-8"))["panels"]
    cells = [
        (x, y)
        for place in (panel["gridPos"] for panel in panels)
        for x in range(place["x"], place["x"] + place["w"])
        for y in range(place["y"], place["y"] + place["h"])
    ]
    assert len(cells) == len(set(cells)) and max(x for x, _ in cells) == 23
    assert len({panel["id"] for panel in panels}) == len(panels)
