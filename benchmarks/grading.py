"""Time `make grade` on sixty submissions: fifteen students, four assignments, into ``results/grading.json``.

Every third student leaves one question of each assignment unanswered, every fifth hands in the notebook as it was.
"""

from __future__ import annotations

import csv
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import nbformat

from assignments.text import RELEASE, ROOT, instructor_version, texts
from dobnb import provenance
from dobnb.files import write_text

STUDENTS, JOBS = 15, 2
CLASSROOM = ROOT / ".venv-classroom" / "bin" / "python"


def hand_in(folder: Path) -> int:
    """Write the submissions; how many."""
    for number in range(1, STUDENTS + 1):
        for text in texts():
            whole = {cell.id: cell.source for cell in instructor_version(text).cells}
            notebook = nbformat.read(RELEASE / f"{text.stem}.ipynb", as_version=4)
            answers = [cell for cell in notebook.cells if cell.metadata.get("nbgrader", {}).get("solution")]
            left_out = answers[0].id if number % 3 == 0 else None
            for cell in answers if number % 5 else ():
                if cell.id != left_out:
                    cell.source = whole[cell.id]
            target = folder / f"student-{number:02}" / f"{text.stem}.ipynb"
            target.parent.mkdir(exist_ok=True)
            nbformat.write(notebook, target)
    return STUDENTS * len(texts())


def main() -> int:
    if not CLASSROOM.exists():
        print("there is no .venv-classroom; `make assignments` installs it", file=sys.stderr)
        return 2
    with tempfile.TemporaryDirectory() as place:
        submissions, out = Path(place) / "in", Path(place) / "out"
        submissions.mkdir()
        count = hand_in(submissions)
        command = [CLASSROOM, "-m", "assignments.grade", submissions, "--out", out]
        born = provenance.origin() | {"started": provenance.now()}
        load, start = os.getloadavg()[0], time.monotonic()
        subprocess.run([*command, "--python", sys.executable, "--jobs", str(JOBS)], cwd=ROOT, check=True)
        seconds = time.monotonic() - start
        with open(out / "grades.csv", encoding="utf-8") as table:
            statuses = [row["status"] for row in csv.DictReader(table)]
    record = {
        "provenance": born | {"load_average": [round(load, 1), round(os.getloadavg()[0], 1)]},
        "submissions": count,
        "at_once": JOBS,
        "seconds": round(seconds),
        "statuses": {status: statuses.count(status) for status in sorted(set(statuses))},
    }
    write_text(ROOT / "results" / "grading.json", json.dumps(record, indent=1) + "\n")
    print(f"{count} submissions: {seconds:.0f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main())
