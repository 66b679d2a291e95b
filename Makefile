# RLK. `make help` lists the targets. Everything happens inside this checkout: .venv/, build/, runs/.
PYTHON ?= python3
VENV   := .venv
PY     := $(VENV)/bin/python
MPIRUN := $(VENV)/bin/mpirun --allow-run-as-root --oversubscribe

.DEFAULT_GOAL := help
.PHONY: help demo test test-mpi test-model cpu hip cuda triton-aot hip-report lint clean

help:  ## list the targets
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 14

demo: cpu  ## train a tiny Qwen3 on 2 CPU ranks, with the audit on; ends with a verdict
	@$(PY) bin/rlk run --profile cpu-tiny

test: cpu  ## run every test that this machine can run
	$(PY) -m pytest -q
	$(MAKE) --no-print-directory test-mpi

test-mpi: cpu  ## the collectives under mpirun, on 2, 4 and 8 ranks
	OMP_NUM_THREADS=1 $(MPIRUN) -n 2 $(PY) -m pytest -q --with-mpi tests/mpi
	OMP_NUM_THREADS=1 $(MPIRUN) -n 4 $(PY) -m pytest -q --with-mpi tests/mpi
	OMP_NUM_THREADS=1 $(MPIRUN) -n 8 $(PY) -m pytest -q --with-mpi tests/mpi

test-model: $(VENV)/ready  ## check the collectives' protocol with spin; part of make test
	$(PY) -m pytest -q tests/model

cpu: $(VENV)/ready  ## build the CPU operators, and the GPU kernels for this host (one fiber per lane)
	@$(PY) -m rlk.build cpu host

hip: $(VENV)/ready  ## build the GPU kernels for gfx942 (ROCm, or clang-19) and check their gates
	@$(PY) -m rlk.build hip

cuda: $(VENV)/ready  ## build the GPU kernels for sm_90a (nvcc)
	@$(PY) -m rlk.build cuda

triton-aot: $(VENV)/ready  ## compile every Triton kernel for gfx942 and sm_90 and check the gates
	@$(PY) -m rlk.build triton

hip-report: $(VENV)/ready  ## print what each kernel takes of an MI300X; writes docs/gfx942.md
	@$(PY) -m rlk.build report

lint: $(VENV)/ready  ## ruff over the Python sources
	$(VENV)/bin/ruff check bin rlk triton tests bench

$(VENV)/ready: requirements.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python >= 3.11 is needed, this is " + sys.version)'
	@$(PYTHON) -m venv $(VENV) || { echo "error: no venv module; on Debian or Ubuntu: apt-get install python3-venv"; exit 1; }
	$(PY) -m pip install --quiet --disable-pip-version-check -r requirements.txt
	@touch $@

clean:  ## delete what was built and the virtual environment (run directories stay)
	rm -rf $(VENV) build
