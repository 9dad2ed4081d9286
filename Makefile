# make book        execute every notebook afresh and render the book, in _build/
# make test        lint, tests, text against notebooks, notebooks re-run and compared, pages without a warning
# make test-slow   the tests that take minutes
# make html        render the committed notebooks
# make pdf         the same as one PDF, _build/pdf/book.pdf; needs Chromium or Chrome
# make run         execute the notebooks that changed, into book/   (PROFILE=paper: the paper's sizes, into runs/paper/)
# make assignments write the student versions, into assignments/release/   (SEED=, SEEDS=, OUT=, SOURCE=)
# make grade SUBMISSIONS=folder   grade what students handed in, into runs/grading/   (MARKS=, JOBS=, UNSANDBOXED=1, ...)
# make bench       time the kernel beside what one would use instead, whole runs, the paper's models at full size: results/
# make clean       remove what the targets above made, but for .venv and runs/

PYTHON ?= python3
PROFILE ?= book
VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed
SUMMARY := _build/test-summary.txt
CLASSROOM := .venv-classroom
CLASSROOM_INSTALLED := $(CLASSROOM)/.installed
# Two processes of one thread each: faster than one of two threads. A file's tests share what they set up.
PYTEST := OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist loadfile

.PHONY: book test test-slow html pdf run assignments grade bench clean
.DELETE_ON_ERROR:

book: $(INSTALLED)
	@$(BIN)/python -m dobnb book

html: $(INSTALLED)
	@$(BIN)/python -m dobnb book html

pdf: $(INSTALLED)
	@$(BIN)/python -m dobnb book pdf

run: $(INSTALLED)
	@$(BIN)/python -m dobnb book run --profile $(PROFILE)

# One part of the tests, $(1) its name, $(2) its command: all parts run, the last line of the recipe tells how they ended.
define part
	@echo; echo "== $(1)"; start=$$(date +%s); if $(2); then end=passed; else end=FAILED; fi; \
	printf '%-20s %s %4d s\n' "$(1)" "$$end" "$$(($$(date +%s) - start))" >>$(SUMMARY)
endef

test: $(INSTALLED) $(CLASSROOM_INSTALLED)
	@mkdir -p _build && rm -f $(SUMMARY)
	$(call part,lint,$(BIN)/python -m ruff check .)
	$(call part,embedded weights,$(BIN)/python -m dobnb fetch)
	$(call part,pages,$(BIN)/python -m dobnb book html)
	$(call part,text and notebooks,$(BIN)/python -m dobnb book check)
	$(call part,notebooks again,$(PYTEST) -q --nbval --nbval-current-env book/*.ipynb)
	$(call part,tests,$(PYTEST))
	@echo; cat $(SUMMARY); ! grep -q FAILED $(SUMMARY)

bench: $(INSTALLED)
	@$(BIN)/python benchmarks/kernel.py
	@$(BIN)/python benchmarks/measure.py
	@$(BIN)/python benchmarks/full_size.py

test-slow: $(INSTALLED) $(CLASSROOM_INSTALLED)
	@$(BIN)/python -m pytest -m slow

assignments: $(CLASSROOM_INSTALLED)
	@$(CLASSROOM)/bin/python -m assignments.release $(if $(SOURCE),--source "$(SOURCE)") $(if $(OUT),--out "$(OUT)") \
	$(if $(SEED),--seed "$(SEED)") $(if $(SEEDS),--seeds "$(SEEDS)")

grade: $(INSTALLED) $(CLASSROOM_INSTALLED)
	@test -n "$(SUBMISSIONS)" || { echo "make: where are the submissions? make grade SUBMISSIONS=folder"; exit 2; }
	@$(CLASSROOM)/bin/python -m assignments.grade "$(SUBMISSIONS)" $(if $(SOURCE),--source "$(SOURCE)") \
	$(if $(OUT),--out "$(OUT)") $(if $(SEED),--seed "$(SEED)") $(if $(SEEDS),--seeds "$(SEEDS)") \
	$(if $(MARKS),--marks "$(MARKS)") $(if $(ASSIGNMENT),--assignment "$(ASSIGNMENT)") $(if $(JOBS),--jobs "$(JOBS)") \
	$(if $(UNSANDBOXED),--unsandboxed)

# The stamp is written last: an install that was broken off is taken up again.
$(INSTALLED): pyproject.toml constraints.txt
	@command -v $(PYTHON) >/dev/null || { echo "make: $(PYTHON) is not installed; set PYTHON, as in make book PYTHON=python3.12"; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))' || { \
	echo "make: $$($(PYTHON) --version) does not do: the book needs Python 3.11 to 3.13;" \
	"set PYTHON, as in make book PYTHON=python3.12"; exit 1; }
	@rm -f $@
	@echo "Installing into $(VENV)/, which takes some minutes and gigabytes the first time"
	@$(BIN)/python -m pip --version >/dev/null 2>&1 || $(PYTHON) -m venv --clear $(VENV)
	@$(BIN)/python -m pip install --disable-pip-version-check -c constraints.txt -e '.[book,test]' || { \
	echo "make: the install failed; see the lines above, then run make again"; exit 1; }
	@touch $@

# The classroom's environment holds nbgrader and what it needs: neither this package nor torch.
$(CLASSROOM_INSTALLED): pyproject.toml constraints.txt assignments/constraints.txt
	@rm -f $@
	@echo "Installing nbgrader into $(CLASSROOM)/, which takes a minute and 350 MB"
	@$(CLASSROOM)/bin/python -m pip --version >/dev/null 2>&1 || $(PYTHON) -m venv --clear $(CLASSROOM)
	@$(CLASSROOM)/bin/python -c 'import tomllib; \
	print(*tomllib.load(open("pyproject.toml", "rb"))["project"]["optional-dependencies"]["classroom"], sep="\n")' \
	>$(CLASSROOM)/requirements.txt
	@$(CLASSROOM)/bin/python -m pip install -q --disable-pip-version-check -c constraints.txt \
	-c assignments/constraints.txt -r $(CLASSROOM)/requirements.txt || { \
	echo "make: the install of nbgrader failed; see the lines above, then run make again"; exit 1; }
	@touch $@

clean:
	rm -rf _build .pytest_cache .ruff_cache .hypothesis dobnb.egg-info
	find assignments dobnb tests -name __pycache__ -type d -prune -exec rm -rf {} +
