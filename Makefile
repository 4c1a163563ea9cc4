# Two commands are enough: `make serve` and `make test`. Both may be run again at any time.

VENV := .venv
TEST_VENV := .venv-test
ARGS ?=

# The first Python that is new enough; `make serve PYTHON=...` chooses another.
PYTHON ?= $(shell for p in python3 python3.14 python3.13 python3.12 python3.11 python; do \
	command -v $$p >/dev/null 2>&1 && $$p -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null \
	&& { echo $$p; break; }; done)

# The build of MLX: Metal comes with the plain package, the others are extras.
ifeq ($(shell uname -s),Darwin)
BUILD := metal
else ifneq ($(wildcard /proc/driver/nvidia/version)$(shell command -v nvidia-smi 2>/dev/null),)
BUILD := cuda13
else
BUILD := cpu
endif
EXTRA := $(filter-out metal,$(BUILD))
COMMA := ,
WITH_EXTRA := $(if $(EXTRA),[$(EXTRA)],)
WITH_DEV := [$(if $(EXTRA),$(EXTRA)$(COMMA),)dev,vision]
# Without what it asks for beside: see the extra `vision` in pyproject.toml.
MLX_VLM := mlx-vlm==0.7.10

.PHONY: serve test check bench clean python

serve: $(VENV)/.installed-$(BUILD)
	$(VENV)/bin/treadle serve $(ARGS)

test: $(TEST_VENV)/.installed-$(BUILD) check
	$(TEST_VENV)/bin/pytest -n 2

check: $(TEST_VENV)/.installed-$(BUILD)
	$(TEST_VENV)/bin/ruff check src tests
	$(TEST_VENV)/bin/ruff format --check src tests
	$(TEST_VENV)/bin/mypy --strict src

bench: $(VENV)/.installed-$(BUILD)
	$(VENV)/bin/python -m treadle.bench $(ARGS)

clean:
	rm -rf $(VENV) $(TEST_VENV)

python:
	@test -n "$(PYTHON)" || { echo "Treadle needs Python 3.11 or newer; install it or pass PYTHON=/path/to/python." >&2; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
		|| { echo "Treadle needs Python 3.11 or newer; $(PYTHON) is `$(PYTHON) --version 2>&1 | head -1`." >&2; exit 1; }

# Installed again when pyproject.toml changes, in place.
$(VENV)/.installed-$(BUILD): pyproject.toml | python
	@test -x $(VENV)/bin/python || $(PYTHON) -m venv $(VENV) \
		|| { echo "Could not create $(VENV); on Debian and Ubuntu install python3-venv." >&2; exit 1; }
	$(VENV)/bin/python -m pip install --editable ".$(WITH_EXTRA)"
	@touch $@

# Made afresh when pyproject.toml changes: nothing forgotten can make a test pass.
$(TEST_VENV)/.installed-$(BUILD): pyproject.toml | python
	rm -rf $(TEST_VENV)
	@$(PYTHON) -m venv $(TEST_VENV) \
		|| { echo "Could not create $(TEST_VENV); on Debian and Ubuntu install python3-venv." >&2; exit 1; }
	$(TEST_VENV)/bin/python -m pip install --editable ".$(WITH_DEV)"
	$(TEST_VENV)/bin/python -m pip install --no-deps $(MLX_VLM)
	@touch $@
