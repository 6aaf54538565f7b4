# `make demo` and `make test` include the set-up.
PY := .venv/bin/python
PAGES := configs/demo/pages_retinanet_cpvt_nano.py
TREES := configs/demo/trees_retinanet_cpvt_nano.py
SEGMENTATION := configs/demo/pages_semantic_fpn_cpvt_nano.py

.PHONY: help setup compiled demo demo-trees demo-seg test coverage test-torch \
	test-original-mm test-foreign test-compiled test-timm test-transformers test-page docs docs-deploy dist owner release \
	test-core test-extras lint lock table drift-table gpu-report fuzz

help:  ## this list
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed 's/:.*## /\t/' | expand -t 18

setup:  ## create or complete the environment in .venv
	@tools/setup_env.sh

# Back: rm -rf .venv
compiled: setup  ## compile mmcv's own operators into .venv: 4 to 10 minutes on 2 cores, with g++
	PATH=$(CURDIR)/.venv/bin:$$PATH CFLAGS="-g0 $$CFLAGS" MMCV_WITH_OPS=1 $(PY) -m uv pip install \
	  --no-build-isolation --no-deps --no-cache --reinstall onedl-mmcv==2.3.6

# An interrupted demo continues; existing data and trainings are kept.
define run_demo
	.venv/bin/cpvt train $(1) --work-dir $(2) --resume
	rm -f $(2)/report.html
	.venv/bin/cpvt test $(1) $$(cat $(2)/last_checkpoint) --work-dir $(2)/test --report $(2)/report.html
	@echo 'Open $(2)/report.html, $(2)/curves.png and $(2)/validation.html'
endef

demo: setup  ## train a document-layout detector, evaluate it, draw its predictions
	.venv/bin/cpvt demo-data pages
	$(call run_demo,$(PAGES),work_dirs/demo)

demo-trees: setup  ## the same with trees in aerial photographs, which it downloads (21 MB)
	.venv/bin/cpvt demo-data trees
	$(call run_demo,$(TREES),work_dirs/demo-trees)
	.venv/bin/cpvt infer $(TREES) $$(cat work_dirs/demo-trees/last_checkpoint) data/trees/whole --tile 512 --out-dir work_dirs/demo-trees/whole

demo-seg: setup  ## the same for a segmentor
	.venv/bin/cpvt demo-data pages
	$(call run_demo,$(SEGMENTATION),work_dirs/demo-seg)

test: setup  ## run the tests
	OMP_NUM_THREADS=1 $(PY) -m pytest -n 2 --dist worksteal

coverage: setup  ## run the tests; the lines that they execute are in build/coverage
	OMP_NUM_THREADS=1 $(PY) -m pytest -n 2 --dist worksteal --cov --cov-report=term:skip-covered --cov-report=html:build/coverage

test-foreign: setup  ## test all detectors and segmentors of OpenMMLab, and exports at all sizes
	OMP_NUM_THREADS=1 $(PY) -m pytest -n 2 --dist worksteal -m 'foreign or not foreign' tests/mm/foreign tests/app/export

test-compiled: compiled  ## compare our operators with mmcv's compiled ones, in all detectors and segmentors
	OMP_NUM_THREADS=1 $(PY) -m pytest -n 2 --dist worksteal -m compiled tests/mmcv_operators

CORE_TESTS = $(addprefix tests/, acceleration checkpoints core padding position tasks)

test-torch:  ## test the core on the oldest supported torch, in .venv-oldest-torch
	@tools/setup_env.sh oldest-torch
	OMP_NUM_THREADS=1 .venv-oldest-torch/bin/python -m pytest -n 2 --dist worksteal $(CORE_TESTS)

define test_original_mm
	@tools/setup_env.sh $(1)
	OMP_NUM_THREADS=1 .venv-$(1)/bin/python -m pytest -n 2 --dist worksteal \
	  $(CORE_TESTS) tests/app/data tests/mm tests/app/training --ignore tests/mm/foreign
endef

test-original-mm:  ## test with the original OpenMMLab packages, with torch 2.1 and with the newest
	$(call test_original_mm,original-mm)
	$(call test_original_mm,original-mm-new-torch)

test-transformers:  ## test with transformers, in .venv-transformers
	@tools/setup_env.sh transformers
	OMP_NUM_THREADS=1 .venv-transformers/bin/python -m pytest tests/with_transformers

test-page: setup  ## test the web page in Chromium; leaves pictures of it in build/page
	@command -v chromium >/dev/null && command -v chromedriver >/dev/null || \
	  { echo 'test-page: Chromium is needed; on Debian, apt-get install chromium chromium-driver'; exit 1; }
	OMP_NUM_THREADS=1 $(PY) -m pytest -m page tests/app/page

fuzz: setup  ## 1000 cases of each fuzz test, a few minutes
	CPVT_FUZZ=1000 OMP_NUM_THREADS=1 $(PY) -m pytest -n 2 --dist worksteal --timeout 3600 tests/fuzz

gpu-report: setup  ## measure beside timm's models on a GPU, in 8 minutes; writes work_dirs/gpu/report.md
	$(PY) -m benchmarks.gpu

test-timm: setup  ## run timm's own tests of models over ours
	OMP_NUM_THREADS=1 $(PY) tests/timm_contract.py -n 2

drift-table: setup  ## measure batch drift again and write experiments/unpadded/findings/batch_drift.md
	OMP_NUM_THREADS=1 $(PY) -m benchmarks.family_drift --write

docs: setup  ## build the documentation in build/site; a broken link is an error
	NO_MKDOCS_2_WARNING=1 $(PY) -m mkdocs build --quiet --strict
	@echo 'Open build/site/index.html; to search it: python -m http.server --directory build/site'

docs-deploy: setup  ## push the documentation to the branch gh-pages, as version DOCS_VERSION=dev or v...
	export PATH=$(CURDIR)/.venv/bin:$$PATH NO_MKDOCS_2_WARNING=1 DOCS_SELECTOR=mike; \
	case "$$DOCS_VERSION" in \
	  v*) mike deploy --update-aliases "$$DOCS_VERSION" latest && mike set-default latest ;; \
	  dev) mike deploy dev ;; \
	  *) echo "DOCS_VERSION must be dev or begin with v, got '$$DOCS_VERSION'"; exit 1 ;; \
	esac
	git push origin gh-pages

dist: setup  ## build the wheel and the source archive in dist/, and try them in bare environments
	rm -rf dist
	$(PY) -m build --installer uv
	$(PY) -m twine check --strict dist/*
	PATH=$(CURDIR)/.venv/bin:$$PATH $(PY) tests/release.py dist

owner:  ## put the account that hosts the repository, NAME=ACCOUNT, in the place of OWNER everywhere
	@python3 tests/release.py owner "$$NAME"

release:  ## `make test-extras`, if the tag TAG=v... is this version, the changelog dated, the owner set
	@python3 tests/release.py tag "$$TAG"
	@$(MAKE) test-extras

test-core: dist  ## try the core of the wheel with the newest torch and nothing else
	PATH=$(CURDIR)/.venv/bin:$$PATH $(PY) tests/release.py dist --torch

test-extras: dist  ## install each extra of the wheel into an environment of its own, and use it
	PATH=$(CURDIR)/.venv/bin:$$PATH $(PY) tests/extras.py dist

lint: setup  ## check the style, the spelling and the types
	.venv/bin/ruff check .
	.venv/bin/ruff format --check .
	git ls-files -z | xargs -0 .venv/bin/codespell
	git ls-files -z '*.sh' .ci/run | xargs -0 .venv/bin/shellcheck
	.venv/bin/mypy --cache-dir build/mypy

table: setup  ## update the README's tables of models and of speed, docs/models.md and docs/performance.md
	$(PY) -m benchmarks.model_table --write
	$(PY) -m benchmarks.speed_tables --write

lock: setup  ## update the pinned versions in requirements/requirements.txt
	.venv/bin/uv pip compile --quiet --universal --python-version 3.10 --no-emit-index-url \
	  --custom-compile-command 'make lock' --override requirements/overrides.txt \
	  --group all --output-file requirements/requirements.txt
