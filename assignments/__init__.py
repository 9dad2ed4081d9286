"""The classroom: assignments made from one text each, and grading in a sandbox. No part of the package `dobnb`.

It runs in an environment of its own (the extra ``classroom``), which holds nbgrader and no torch; students' code runs
in the book's.
"""

import sys

# jsonschema would check URLs with it, of which notebooks have none; it compiles a grammar, a second at each import.
sys.modules.setdefault("rfc3987_syntax", None)  # type: ignore[arg-type]
