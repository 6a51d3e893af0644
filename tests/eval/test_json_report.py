from __future__ import annotations

import json
import math
from dataclasses import asdict
from pathlib import Path

from eval.json_report import write_report
from eval.score import check_seal, seal
from eval.stats import geometric_mean_interval, mean_interval, median_interval, wilson
from tests.eval.strict_json import strict


def test_what_json_cannot_say_is_null_at_any_depth_and_the_rest_as_it_was(tmp_path: Path) -> None:
    found = [geometric_mean_interval([2.0]), mean_interval([2.0]), median_interval([2.0]), wilson(0, 0)]
    for indent in (1, None):
        write_report(tmp_path / "report.json", {"x": ([asdict(item) for item in found], 1, "a", None, True)}, indent)
        rows, *rest = strict(tmp_path / "report.json")["x"]
        assert [(row["value"], row["high"]) for row in rows] == [(2.0, None), (2.0, None), (2.0, None), (None, 1.0)]
        assert rest == [1, "a", None, True]


def test_a_prediction_with_such_a_number_keeps_its_seal(tmp_path: Path) -> None:
    write_report(tmp_path / "p.json", seal({}, {"rate": math.inf}, now=1.0))
    assert check_seal(json.loads((tmp_path / "p.json").read_text()), 2.0) == []
