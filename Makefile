# Every target does its own set-up: all it needs is Python 3.11 or newer and gcc.
#   make demo    a real chat model answers a question, plain and accelerated side by side
#   make test    the tests            make check   lint, format, types, generated docs, size of the heart
#   make test-real    the tests that need the real model
#   make test-clients the examples, with the packages of the clients that they use (docs/clients.md)
#   make sanitize     the C library under sanitisers of memory, arithmetic and threads, and damaged
#                     files read with it (docs/native.md)
#   make test-arm    the C library's own program for ARM, in an emulator
#   make test-x86    the same program here, and which kernels older processors choose
#   make wheel   wheels in dist/: foretell, which other Linux machines take, too, and foretell-models
#   make docs    the site in site/    make clean   removes everything that these targets made

# The first of these that is new enough; another one: make PYTHON=/path/to/python
PYTHON ?= $(shell for p in python3 python3.11 python3.12 python3.13 python; do \
    $$p -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo $$p && break; done)
VENV := .venv
BIN := $(VENV)/bin
CLIENTS := .cache/clients
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt
QUESTION ?= What is the capital of France, and what is it known for?
export QUESTION
CODE := 'import argparse\n\n\ndef main():\n    parser = argparse.ArgumentParser()\n'

# The C library, and the program that tests it by itself.
SRC := foretell/native/src
C_FILES := $(wildcard $(SRC)/*.[ch])
PARTS := $(filter-out $(SRC)/module.c,$(wildcard $(SRC)/*.c))
TESTED := $(PARTS) $(wildcard tests/native/*.c)
SANITIZED := build/sanitize
WATCHED := $(SANITIZED)/memory/_library.so
# Without warnings: a sanitiser's own code makes the compiler warn of what cannot happen.
C_FLAGS := -std=c11 -O1 -g -ffp-contract=off -w -I$(SRC)
# Calls instead of checks in place: the large kernels are compiled in half the time.
# The same parts are of the program and of a library that Python loads (scripts/damage.py).
MEMORY := -fPIC -fsanitize=address,undefined,float-cast-overflow -fno-sanitize-recover=all \
    --param asan-instrumentation-with-call-threshold=0
THREADS := -fsanitize=thread -DNO_FORKS
# The same for other processors, in an emulator.
ELSEWHERE := build/elsewhere
ARM_CC ?= aarch64-linux-gnu-gcc
ARM_QEMU ?= qemu-aarch64
X86_QEMU ?= qemu-x86_64
STATIC := -std=c11 -O2 -ffp-contract=off -static -DNO_FORKS -w -I$(SRC)

.PHONY: demo test test-real test-clients test-arm test-x86 check sanitize damage-heads damage-files docs wheel clean
.DELETE_ON_ERROR:

demo: $(VENV)/.ready
	@if $(BIN)/foretell fetch smollm2 >/dev/null; then \
	    $(BIN)/foretell generate --model smollm2 --chat --compare --max-new-tokens 128 "$$QUESTION"; \
	else \
	    echo "so the embedded model writes code instead" >&2; \
	    printf $(CODE) | $(BIN)/foretell generate --compare --max-new-tokens 128 -; \
	fi

# One thread: the tests are many small forwards, which threads only slow down.
test: $(VENV)/.ready
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n auto $(ARGS)

# At most 8 minutes on two cores. Tests of a model that cannot be fetched are skipped.
test-real: $(VENV)/.ready
	$(BIN)/foretell fetch smollm2
	-$(BIN)/foretell fetch gemma3-270m
	OMP_NUM_THREADS=1 timeout 480 $(BIN)/python -m pytest -n auto -m real tests/real $(ARGS)

# The clients have an environment of their own, as those of other people have.
test-clients: $(VENV)/.ready $(CLIENTS)/.ready
	FORETELL_CLIENTS=$(CLIENTS)/bin/python OMP_NUM_THREADS=1 $(BIN)/python -m pytest tests/examples $(ARGS)

$(CLIENTS)/.ready: examples/requirements.txt constraints.txt
	@echo "set-up, done once: clients in $(CLIENTS)"
	@$(PYTHON) -m venv --clear $(CLIENTS)
	@$(CLIENTS)/bin/python -m pip install --quiet --disable-pip-version-check -c constraints.txt \
	    -r examples/requirements.txt
	@touch $@

check: $(VENV)/.ready
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/python scripts/size.py
	$(BIN)/python scripts/docs.py --check

# Under four minutes on two cores, and less where little has changed.
sanitize: $(VENV)/.ready
	@$(MAKE) --no-print-directory -j2 $(WATCHED) $(SANITIZED)/memory/test $(SANITIZED)/threads/test
	$(SANITIZED)/memory/test
	$(SANITIZED)/threads/test
	@$(MAKE) --no-print-directory -j2 damage-heads damage-files

# 1,000 damaged files of each kind, read and used with the C library that watches its memory. What is
# too large for memory must be an error there, as it is elsewhere, and Python frees nothing at its end.
damage-heads: KINDS := heads
damage-files: KINDS := stores gguf states gates
damage-heads damage-files: $(WATCHED)
	LD_PRELOAD=$$($(CC) -print-file-name=libasan.so) OMP_NUM_THREADS=1 \
	    ASAN_OPTIONS=detect_leaks=0:allocator_may_return_null=1 \
	    $(BIN)/python scripts/damage.py $(KINDS) --library $(WATCHED)

$(WATCHED): $(PARTS:%.c=$(SANITIZED)/memory/%.o) $(SANITIZED)/memory/$(SRC)/module.o
	$(CC) -shared $(MEMORY) $^ -lm -lpthread -o $@

$(SANITIZED)/memory/$(SRC)/module.o: C_FLAGS += -I$(shell $(BIN)/python -c \
    'import sysconfig; print(sysconfig.get_path("include"))' 2>/dev/null)

$(SANITIZED)/memory/test: $(TESTED:%.c=$(SANITIZED)/memory/%.o)
	$(CC) $(MEMORY) $^ -lm -lpthread -o $@

$(SANITIZED)/threads/test: $(TESTED:%.c=$(SANITIZED)/threads/%.o)
	$(CC) $(THREADS) $^ -lm -lpthread -o $@

$(SANITIZED)/memory/%.o: %.c $(C_FILES) tests/native/checks.h
	@mkdir -p $(@D)
	$(CC) $(C_FLAGS) $(MEMORY) -c $< -o $@

# Kernels share nothing among themselves: the portable ones stand for all where threads are watched.
$(SANITIZED)/threads/$(SRC)/kernels_avx%.o: $(SRC)/kernels_avx%.c $(C_FILES)
	@mkdir -p $(@D)
	$(CC) $(C_FLAGS) -c $< -o $@

$(SANITIZED)/threads/%.o: %.c $(C_FILES) tests/native/checks.h
	@mkdir -p $(@D)
	$(CC) $(C_FLAGS) $(THREADS) -c $< -o $@

# $(call wanted,PROGRAM,DEBIAN PACKAGES)
wanted = command -v $(1) >/dev/null || { echo "error: $(1) is not there: apt-get install $(2)" >&2; exit 2; }

# The program compares all bits with those of the portable kernels. $(call emulated,COMMAND,KERNELS THAT
# MUST RUN,KERNELS THAT MUST NOT) writes what it says to the target, and shows it.
define emulated
@$(1) $(<) > $@.said 2>&1 || { cat $@.said; echo "error: $(1) $(<)" >&2; exit 1; }
@echo "$(1)"; grep -v "warning: TCG" $@.said
@grep -q "^$(2) kernels: products are right" $@.said || { echo "error: no $(2) kernels ran: $(1)" >&2; exit 1; }
@! grep -q "^$(3)" $@.said || { echo "error: $(3) kernels ran: $(1)" >&2; exit 1; }
endef

# ARM with all that is emulated, dot products among it, and without: under four minutes on two cores.
test-arm:
	@$(call wanted,$(ARM_CC),gcc-aarch64-linux-gnu libc6-dev-arm64-cross)
	@$(call wanted,$(ARM_QEMU),qemu-user)
	@$(MAKE) --no-print-directory -j2 $(ELSEWHERE)/arm/test
	@$(MAKE) --no-print-directory -j2 $(ELSEWHERE)/arm/max $(ELSEWHERE)/arm/cortex-a53

$(ELSEWHERE)/arm/max: $(ELSEWHERE)/arm/test always
	$(call emulated,$(ARM_QEMU) -cpu max,neon,avx)

$(ELSEWHERE)/arm/cortex-a53: $(ELSEWHERE)/arm/test always
	$(call emulated,$(ARM_QEMU) -cpu cortex-a53,portable,neon)

# This processor computes by all kinds of kernels that it runs; which ones older processors run is
# asked in an emulator, where computing would take half an hour.
test-x86:
	@$(call wanted,$(X86_QEMU),qemu-user)
	@$(MAKE) --no-print-directory -j2 $(ELSEWHERE)/x86/test $(ELSEWHERE)/x86/kinds
	@$(MAKE) --no-print-directory $(ELSEWHERE)/x86/here
	$(call chosen,Haswell,avx2 portable)
	$(call chosen,Nehalem,portable)

$(ELSEWHERE)/x86/here: $(ELSEWHERE)/x86/test always
	$(call emulated,env,portable,neon)

# $(call chosen,PROCESSOR,KINDS OF KERNELS)
define chosen
@kinds=$$(echo $$($(X86_QEMU) -cpu $(1) $(ELSEWHERE)/x86/kinds 2>/dev/null)); echo "$(1): $$kinds"; \
    [ "$$kinds" = "$(2)" ] || { echo "error: $(1) runs $(2)" >&2; exit 1; }
endef

$(ELSEWHERE)/x86/kinds: $(PARTS:%.c=$(ELSEWHERE)/x86/%.o) $(ELSEWHERE)/x86/tests/native/choice/kinds.o
	$(CC) -static $^ -lm -lpthread -o $@

.PHONY: always
always:

$(ELSEWHERE)/arm/test: $(TESTED:%.c=$(ELSEWHERE)/arm/%.o)
	$(ARM_CC) -static $^ -lm -lpthread -o $@

$(ELSEWHERE)/x86/test: $(TESTED:%.c=$(ELSEWHERE)/x86/%.o)
	$(CC) -static $^ -lm -lpthread -o $@

$(ELSEWHERE)/arm/%.o: %.c $(C_FILES) tests/native/checks.h
	@mkdir -p $(@D)
	$(ARM_CC) $(STATIC) -c $< -o $@

$(ELSEWHERE)/x86/%.o: %.c $(C_FILES) tests/native/checks.h
	@mkdir -p $(@D)
	$(CC) $(STATIC) -c $< -o $@

docs: $(VENV)/.docs
	$(BIN)/python scripts/docs.py
	$(BIN)/zensical build --strict --clean
	@echo "wrote site/index.html"

# An index refuses the tag linux_x86_64 that a build by itself has: auditwheel says which systems the C library runs on.
wheel: $(VENV)/.wheel
	rm -rf build/wheel
	$(BIN)/python -m pip wheel --quiet --disable-pip-version-check --no-deps -w build/wheel .
	PATH="$(CURDIR)/$(BIN):$$PATH" $(BIN)/auditwheel repair -w dist build/wheel/*.whl
	$(BIN)/python -m pip wheel --quiet --disable-pip-version-check --no-deps -w dist ./models

# torch comes first and alone: the others would otherwise choose a build of it with CUDA. Where
# nothing but the C library has changed, it alone is built again.
$(VENV)/.ready: pyproject.toml constraints.txt setup.py $(C_FILES)
	@test -n "$(PYTHON)" || { echo "error: no Python 3.11 or newer found; name one: make PYTHON=/path/to/python" >&2; exit 2; }
	@if [ -f $@ ] && [ -z "$(filter-out setup.py $(C_FILES),$?)" ]; then \
	    echo "the C library is built again"; \
	    $(PIP) --no-deps -e .; \
	else \
	    echo "set-up, done once: environment in $(VENV)"; \
	    { $(BIN)/python -m pip --version >/dev/null 2>&1 || $(PYTHON) -m venv --clear $(VENV); } && \
	    echo "set-up, done once: torch (the largest download, a few minutes on a slow line)" && \
	    $(PIP) "$$(grep '^torch==' constraints.txt)" && \
	    echo "set-up, done once: foretell and its tools" && \
	    $(PIP) -e '.[dev,cpu]'; \
	fi
	@touch $@

$(VENV)/.docs: $(VENV)/.ready
	@echo "set-up, done once: the site builder"
	@$(PIP) -e '.[dev,cpu,docs]'
	@touch $@

$(VENV)/.wheel: $(VENV)/.ready
	@echo "set-up, done once: the wheel's tools"
	@$(PIP) -e '.[dev,cpu,wheel]'
	@touch $@

clean:
	rm -rf $(VENV) site .cache build models/build dist *.egg-info models/*.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	rm -f foretell/native/_library*
	find foretell tests scripts -name __pycache__ -type d -prune -exec rm -rf {} +
