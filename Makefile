# Every target installs what it needs: Python packages into .venv, from requirements.lock, and Go tools into .tools,
# from the go.mod files under tests/tools. A second run finds them there and takes no time.

SHELL := bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
MAKEFLAGS += --no-builtin-rules --no-print-directory

# Any Python >= 3.11, for making .venv only.
PYTHON ?= python3
# What builds the image: docker, podman or buildah.
BUILDER ?= docker
IMAGE ?= ray-finetune
PYTEST_ARGS ?=
BENCH_ARGS ?=

BIN := .tools/bin
TOOLS := helm helm4 helm-unittest kubeconform kube-score versitygw toxiproxy actionlint helm-docs
# What `make cluster` runs: Kubernetes itself, and what a cluster for this chart has beside it.
KUBERNETES := kube-apiserver kube-controller-manager kube-scheduler kubelet kube-proxy kubectl
CLUSTER := $(KUBERNETES) etcd containerd containerd-shim-runc-v2 ctr coredns kube-router kuberay-operator kuberay-submitter
CHART := charts/ray-finetune
# What the chart is linted with: each environment, and the values files that ct installs.
VALUES := $(wildcard environments/*/values.yaml $(CHART)/ci/*-values.yaml)
SCRIPTS := .ci/run $(shell git ls-files '*.sh' 2>/dev/null)
VERSION := $(shell sed -n 's/^version = "\(.*\)"$$/\1/p' pyproject.toml)
WITH_TOOLS := PATH="$(CURDIR)/$(BIN):$(CURDIR)/.venv/bin:$$PATH"

.PHONY: help
help: ## List the targets
	@awk -F ':.*## ' '/^[a-z0-9-]+:.*## / {printf "  make %-10s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

# ---- Run -------------------------------------------------------------------------------------------------------------

# exec: make's child is the trainer itself, so a SIGTERM to make reaches it once, and make waits until it has saved.
.PHONY: train
train: .venv/.stamp ## Fine-tune a small real model on this machine; run it again to resume after an interruption
	@exec .venv/bin/ray-finetune train

# Names an environment only from the command line: some shells keep a file's name in a variable ENV.
.PHONY: efa-test
efa-test: $(BIN)/helm ## Try EFA and NCCL on an environment's nodes, without a run: ENV=staging, NAMESPACE=name
	@$(WITH_TOOLS) tests/tools/efa-test.sh $(if $(filter command line,$(origin ENV)),"$(ENV)")

.PHONY: new-env
new-env: .venv/.stamp $(BIN)/helm ## Write a new environment: NAME=research INSTANCE=g6.12xlarge NODES=2
	@.venv/bin/python tests/tools/new_env.py "$(if $(filter command line,$(origin NAME)),$(NAME))" "$(INSTANCE)" "$(NODES)"

# ---- A cluster on this machine ----------------------------------------------------------------------------------------

.PHONY: cluster-check
cluster-check: .venv/.stamp # What this machine lacks for a cluster, before anything is built for it
	@.venv/bin/python tests/cluster/cluster.py check

# The Go programs take a while to build where nothing is cached.
.PHONY: cluster
cluster: cluster-check $(addprefix $(BIN)/,$(CLUSTER) helm versitygw) ## Run a real Kubernetes with KubeRay and an S3 server here (as root, on Debian)
	@.venv/bin/python tests/cluster/cluster.py up

.PHONY: cluster-down
cluster-down: ## End that cluster; its images stay in .cluster
	@.venv/bin/python tests/cluster/cluster.py down

# The image on CPUs: the same Dockerfile and lock on a stand-in of the DLC.
.PHONY: cluster-image
cluster-image: cluster
	@tests/image/build_base.sh
	@BUILDAH_ISOLATION=chroot $(MAKE) image BUILDER=buildah IMAGE=localhost/ray-finetune BASE_IMAGE=localhost/ray-train-stand-in
	@.venv/bin/python tests/cluster/cluster.py load localhost/ray-finetune:$(VERSION)

.PHONY: e2e
e2e: cluster-image e2e-tests ## Install the chart on that cluster, disturb its runs, and see them end well; PYTEST_ARGS='-k head'

.PHONY: e2e-tests
e2e-tests: # On the cluster and the image that are there
	@.venv/bin/pytest tests/e2e --ignore tests/e2e/test_gitops.py -m "not full" --timeout 1200 --durations 0 $(PYTEST_ARGS)

# With Kueue, and with all else that a run may meet.
.PHONY: e2e-full
e2e-full: cluster-image $(BIN)/kueue ## The same and more: lost workers, no S3 for a while, queues, who reaches a run's ports
	@.venv/bin/python tests/cluster/cluster.py kueue
	@.venv/bin/pytest tests/e2e --ignore tests/e2e/test_gitops.py --timeout 1200 --durations 0 $(PYTEST_ARGS)

# Redis comes from Debian: apt-get install redis-server.
.PHONY: gitops-e2e
gitops-e2e: cluster-image $(addprefix $(BIN)/,argocd registry kueue) ## Let Argo CD deploy commits to that cluster, and see the right thing happen
	@.venv/bin/python tests/cluster/cluster.py kueue
	@.venv/bin/pytest tests/e2e/test_gitops.py --timeout 1200 --durations 0 $(PYTEST_ARGS)

# ---- Check -----------------------------------------------------------------------------------------------------------

.PHONY: test
test: .venv/.stamp $(addprefix $(BIN)/,helm helm4 helm-unittest kubeconform kube-score versitygw toxiproxy) ## Run all tests; PYTEST_ARGS='-k name' chooses some
	@$(WITH_TOOLS) helm-unittest --strict $(CHART)
	@$(WITH_TOOLS) pytest $(PYTEST_ARGS)

.PHONY: chaos
chaos: .venv/.stamp $(addprefix $(BIN)/,versitygw toxiproxy) ## Kill, freeze, stop and damage small runs at random, and see that nothing is lost: ROUNDS=200, from SEED=1 on
	@$(WITH_TOOLS) python tests/chaos/chaos.py --rounds $(or $(ROUNDS),200) --seed $(or $(SEED),1) $(if $(OUT),--out "$(OUT)")

.PHONY: test-argocd
test-argocd: .venv/.stamp $(addprefix $(BIN)/,argocd helm kubeconform) ## Let Argo CD itself judge each RayJob status, difference and notification
	@$(WITH_TOOLS) pytest -rs tests/gitops $(PYTEST_ARGS)

.PHONY: cases
cases: .venv/.stamp $(addprefix $(BIN)/,helm helm-unittest) ## Run the chart's unit tests and all property tests and count them: EXAMPLES=1000 of each property
	@$(WITH_TOOLS) python tests/tools/count_cases.py $(EXAMPLES)

.PHONY: bench-data
bench-data: .venv/.stamp .cache/peers/.stamp ## Measure the data part beside TRL and datasets into benchmarks/; QUICK=1 takes a minute
	@.venv/bin/python tests/bench/data.py $(if $(QUICK),--quick)
.PHONY: bench
bench: .venv/.stamp ## Measure speed on this machine's GPU, for a file in benchmarks/; BENCH_ARGS='--steps 9 full chat'
	@.venv/bin/python tests/bench/speed.py $(BENCH_ARGS)

.PHONY: lint lint-python lint-yaml lint-shell lint-image lint-workflows lint-chart lint-gitops
lint: lint-python lint-yaml lint-shell lint-image lint-workflows lint-chart lint-gitops ## Check style, types, scripts, image, workflows, chart and environments

lint-python: .venv/.stamp
	.venv/bin/ruff check
	.venv/bin/ruff format --check
	.venv/bin/pyright

lint-yaml: .venv/.stamp
	.venv/bin/yamllint --strict .

lint-shell: .venv/.stamp
	.venv/bin/shellcheck $(SCRIPTS)

lint-image: .venv/.stamp
	.venv/bin/hadolint image/Dockerfile

lint-workflows: .venv/.stamp $(BIN)/actionlint
	$(BIN)/actionlint -shellcheck .venv/bin/shellcheck
	.venv/bin/zizmor --offline --no-progress --quiet .github

lint-chart: .venv/.stamp $(addprefix $(BIN)/,helm kube-score)
	@for values in $(VALUES); do \
	  echo "helm lint --strict $(CHART) --values $$values"; \
	  $(BIN)/helm lint --strict --quiet $(CHART) --values "$$values"; \
	done
	.venv/bin/python tests/chart/score.py
	.venv/bin/python tests/chart/lint_chart.py

lint-gitops: .venv/.stamp $(BIN)/kubeconform
	.venv/bin/python tests/gitops/lint_gitops.py

.PHONY: verify
verify: lint .venv/.stamp $(BIN)/helm-docs ## Check that every generated file is what its source gives, and lint
	.venv/bin/python tests/chart/generate_catalogue.py --check
	.venv/bin/python tests/chart/generate_schema.py --check
	.venv/bin/python tests/chart/generate_readme.py --check
	.venv/bin/python tests/tools/lock.py --check

# ---- Generate --------------------------------------------------------------------------------------------------------

.PHONY: format
format: .venv/.stamp ## Format the Python code and mend what ruff can
	.venv/bin/ruff check --fix
	.venv/bin/ruff format

.PHONY: schema
schema: .venv/.stamp ## Write the chart's values.schema.json and instance catalogue from their sources
	.venv/bin/python tests/chart/generate_catalogue.py
	.venv/bin/python tests/chart/generate_schema.py

.PHONY: docs
docs: .venv/.stamp $(BIN)/helm-docs ## Write the chart's README.md from values.yaml and README.md.gotmpl
	.venv/bin/python tests/chart/generate_readme.py

.PHONY: lock
lock: .venv/bin/uv ## Lock the Python packages again, for this machine and for the image; UPGRADE=1 takes newer ones
	$(PYTHON) tests/tools/lock.py $(if $(UPGRADE),--upgrade)

# ---- Package ---------------------------------------------------------------------------------------------------------

.PHONY: wheel
wheel: .venv/bin/uv ## Build the trainer's wheel into dist/
	@rm -f dist/*.whl
	.venv/bin/uv build --system-certs --wheel --build-constraints requirements.lock --require-hashes --out-dir dist

.PHONY: wheels
wheels: wheel
	@rm -rf dist/wheels
	image/wheels.sh image/requirements.txt dist/wheels

.PHONY: image
image: wheels ## Build the image on top of the Ray Train DLC; BUILDER=buildah, IMAGE=name, BASE_IMAGE=reference
	$(BUILDER) build --file image/Dockerfile --tag $(IMAGE):$(VERSION) --build-arg VERSION=$(VERSION) \
	  --build-arg REVISION="$$(git rev-parse HEAD)" $(if $(BASE_IMAGE),--build-arg BASE_IMAGE=$(BASE_IMAGE)) .

.PHONY: package
package: $(BIN)/helm ## Package the chart into dist/
	@rm -f dist/*.tgz
	$(BIN)/helm package $(CHART) --destination dist

.PHONY: promote
promote: ## Move an environment to this version, or to TO=version, in its file: ENV=staging
	@.github/scripts/promote.sh "$(if $(filter command line,$(origin ENV)),$(ENV))" "$(or $(TO),$(VERSION))"

.PHONY: release-rehearsal
release-rehearsal: wheel package $(addprefix $(BIN)/,registry crane cosign) ## Release to a registry on this machine: push, sign, verify, pull
	@$(WITH_TOOLS) tests/tools/release-rehearsal.sh

.PHONY: version
version: ## Print the version, and fail where chart, changelog or TAG say another
	@.github/scripts/version.sh $(TAG)

# ---- Install ---------------------------------------------------------------------------------------------------------

.PHONY: tools
tools: .venv/.stamp $(addprefix $(BIN)/,$(TOOLS)) ## Install everything that the other targets use

.venv/bin/uv:
	@command -v $(PYTHON) >/dev/null || { echo "Python >= 3.11 is needed, and there is no $(PYTHON) on PATH (make PYTHON=... names another)." >&2; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "Python >= 3.11 is needed, and $(PYTHON) is $$($(PYTHON) --version 2>&1) (make PYTHON=... names another)." >&2; exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || { echo "Python's venv module is needed (on Debian: apt-get install python3-venv)." >&2; exit 1; }
	@echo "Making .venv"
	@$(PYTHON) -m venv --clear .venv
	@sed -n '/^uv==/,/[^\\]$$/p' requirements.lock > .venv/uv.txt
	@.venv/bin/python -m pip install --quiet --disable-pip-version-check --require-hashes --requirement .venv/uv.txt

.venv/.stamp: requirements.lock pyproject.toml | .venv/bin/uv
	@echo "Installing the Python packages of requirements.lock into .venv"
	@.venv/bin/uv pip sync --quiet --system-certs --python .venv/bin/python --require-hashes --compile-bytecode requirements.lock
	@.venv/bin/uv pip install --quiet --system-certs --python .venv/bin/python --no-deps --no-build-isolation --editable .
	@touch $@

# TRL, which only the data benchmark measures beside this project, never shares the project's own environment.
.cache/peers/.stamp: tests/bench/peers.txt | .venv/bin/uv
	@echo "Installing TRL and datasets into .cache/peers/venv"
	@.venv/bin/uv venv --quiet --clear --system-certs --python .venv/bin/python .cache/peers/venv
	@.venv/bin/uv pip sync --quiet --system-certs --python .cache/peers/venv/bin/python tests/bench/peers.txt
	@touch $@

# $(call go-build,group,package,-X flags): static, without the symbols that only a debugger reads.
go-build = command -v go >/dev/null || { echo "Go >= 1.26 is needed to build $(@F), and there is no go on PATH (https://go.dev/dl)." >&2; exit 1; }; \
	echo "Building $(@F) from tests/tools/$(1)/go.mod"; \
	CGO_ENABLED=0 GOWORK=off go build -C tests/tools/$(1) -trimpath -ldflags "-s -w $(3)" -o "$(CURDIR)/$@" $(2); \
	touch $@
# The version of a Go module, as the group's go.mod has it.
go-version = $$(GOWORK=off go list -C tests/tools/$(1) -m -f '{{.Version}}' $(2))
# Helm takes the Kubernetes version that charts are checked against from here; left out, it is 1.20.
helm-flags = $$(minor=$(call go-version,helm,k8s.io/client-go); minor=$${minor\#v0.}; for package in pkg/chartutil pkg/lint/rules; do \
	echo "-X helm.sh/helm/v3/$$package.k8sVersionMajor=1 -X helm.sh/helm/v3/$$package.k8sVersionMinor=$${minor%%.*}"; done)

# A helm of a supported version that is on PATH is used as it is, through a script of one line.
$(BIN)/helm: tests/tools/helm/go.mod tests/tools/helm/go.sum
	@mkdir -p $(@D)
	@found=$$(PATH="$${PATH//"$(CURDIR)/$(BIN)":/}"; type -P helm || true); \
	if [[ -n "$$found" && "$$("$$found" version --short 2>/dev/null)" =~ ^v(3\.(1[7-9]|[2-9][0-9])|4)\. ]]; then \
	  echo "Using $$found"; rm -f $@; printf '#!/bin/sh\nexec "%s" "$$@"\n' "$$found" > $@; chmod +x $@; \
	else \
	  rm -f $@; $(call go-build,helm,helm.sh/helm/v3/cmd/helm,-X helm.sh/helm/v3/internal/version.version=$(call go-version,helm,helm.sh/helm/v3) $(helm-flags)); \
	fi

# The other major version, so that the chart is seen to render the same under both.
$(BIN)/helm4: tests/tools/helm4/go.mod tests/tools/helm4/go.sum
	@$(call go-build,helm4,helm.sh/helm/v4/cmd/helm,-X helm.sh/helm/v4/internal/version.version=$(call go-version,helm4,helm.sh/helm/v4))

$(BIN)/helm-unittest: tests/tools/helm/go.mod tests/tools/helm/go.sum
	@$(call go-build,helm,github.com/helm-unittest/helm-unittest/cmd/helm-unittest,$(helm-flags))

$(BIN)/kubeconform: tests/tools/kubeconform/go.mod tests/tools/kubeconform/go.sum
	@$(call go-build,kubeconform,github.com/yannh/kubeconform/cmd/kubeconform)

$(BIN)/kube-score: tests/tools/kube-score/go.mod tests/tools/kube-score/go.sum
	@$(call go-build,kube-score,github.com/zegl/kube-score/cmd/kube-score)

$(BIN)/versitygw: tests/tools/versitygw/go.mod tests/tools/versitygw/go.sum
	@$(call go-build,versitygw,github.com/versity/versitygw/cmd/versitygw,-X main.Version=$(call go-version,versitygw,github.com/versity/versitygw))

$(BIN)/toxiproxy: tests/tools/toxiproxy/go.mod tests/tools/toxiproxy/go.sum
	@$(call go-build,toxiproxy,github.com/Shopify/toxiproxy/v2/cmd/server)

$(BIN)/actionlint: tests/tools/actionlint/go.mod tests/tools/actionlint/go.sum
	@$(call go-build,actionlint,github.com/rhysd/actionlint/cmd/actionlint)

# Argo CD asks for a newer Go than the other tools, which go gets by itself; a cold build takes some six minutes of two cores, so
# `make tools` leaves it out.
$(BIN)/argocd: export GOTOOLCHAIN = auto
$(BIN)/argocd: tests/tools/argocd/go.mod tests/tools/argocd/go.sum
	@$(call go-build,argocd,github.com/argoproj/argo-cd/v3/cmd)

# The release's tools; cosign takes some minutes to build, so `make tools` leaves them out.
$(BIN)/cosign: tests/tools/release/go.mod tests/tools/release/go.sum
	@$(call go-build,release,github.com/sigstore/cosign/v3/cmd/cosign)

$(BIN)/crane: tests/tools/release/go.mod tests/tools/release/go.sum
	@$(call go-build,release,github.com/google/go-containerregistry/cmd/crane)

$(BIN)/registry: tests/tools/release/go.mod tests/tools/release/go.sum
	@$(call go-build,release,github.com/distribution/distribution/v3/cmd/registry)

$(BIN)/helm-docs: tests/tools/helm-docs/go.mod tests/tools/helm-docs/go.sum
	@$(call go-build,helm-docs,github.com/norwoodj/helm-docs/cmd/helm-docs)

$(addprefix $(BIN)/,$(KUBERNETES)): tests/tools/kubernetes/go.mod tests/tools/kubernetes/go.sum
	@$(call go-build,kubernetes,k8s.io/kubernetes/cmd/$(@F),-X k8s.io/component-base/version.gitVersion=$(call go-version,kubernetes,k8s.io/kubernetes))

$(BIN)/etcd: tests/tools/etcd/go.mod tests/tools/etcd/go.sum
	@$(call go-build,etcd,go.etcd.io/etcd/server/v3)

$(addprefix $(BIN)/,containerd containerd-shim-runc-v2 ctr): tests/tools/containerd/go.mod tests/tools/containerd/go.sum
	@$(call go-build,containerd,github.com/containerd/containerd/v2/cmd/$(@F))

$(BIN)/coredns: tests/tools/coredns/go.mod tests/tools/coredns/go.sum
	@$(call go-build,coredns,github.com/coredns/coredns)

$(BIN)/kube-router: tests/tools/kube-router/go.mod tests/tools/kube-router/go.sum
	@$(call go-build,kube-router,github.com/cloudnativelabs/kube-router/v2/cmd/kube-router)

$(BIN)/kuberay-operator: tests/tools/kuberay/go.mod tests/tools/kuberay/go.sum
	@$(call go-build,kuberay,github.com/ray-project/kuberay/ray-operator)

$(BIN)/kueue: tests/tools/kueue/go.mod tests/tools/kueue/go.sum
	@$(call go-build,kueue,sigs.k8s.io/kueue/cmd/kueue)

$(BIN)/kuberay-submitter: tests/tools/kuberay/go.mod tests/tools/kuberay/go.sum
	@$(call go-build,kuberay,github.com/ray-project/kuberay/ray-operator/rayjob-submitter/cmd)

.PHONY: clean
clean: ## Remove everything that make installs and builds; runs/ stays
	rm -rf .venv .tools dist build .pytest_cache .ruff_cache .hypothesis
