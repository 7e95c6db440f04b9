"""Argo CD's own controllers beside the cluster of `make cluster`, a Git repository and a registry for the chart, all on this machine.

What runs is the repository's own: environments/applicationset.yaml, project.yaml and platform/argocd, with the addresses of Git,
registry and cluster replaced, and environments/smoke.
"""

import base64
import json
import os
import secrets
import shutil
import subprocess
import time
from pathlib import Path
from typing import Any

import cluster
import lint_gitops
import yaml
from release import make_namespace, wait

ROOT, BIN = cluster.ROOT, cluster.BIN
ENVIRONMENTS = ROOT / "environments"
NAMESPACE = "ray-finetune-smoke"
APPLICATION = "ray-finetune-smoke"
REGISTRY, REDIS, REPO_SERVER = "127.0.0.1:5056", "127.0.0.1:6390", "127.0.0.1:8081"


class ArgoCD:
    def __init__(self, folder: Path, values: dict[str, Any]):
        """`folder` is for all that it writes; `values` are those of the first commit."""
        self.folder = folder
        self.repository = folder / "repository"
        self.processes: list[subprocess.Popen[bytes]] = []
        self.make_repository(values)

    # ---- Git ----

    def make_repository(self, values: dict[str, Any]) -> None:
        environment = self.repository / "environments/smoke"
        environment.mkdir(parents=True)
        shutil.copy(ENVIRONMENTS / "smoke/environment.yaml", environment)
        self.git("init", "--quiet", "--initial-branch=main")
        self.commit("The environment", values)

    def git(self, *arguments: str) -> str:
        identity = ["-c", "user.name=e2e", "-c", "user.email=e2e@localhost"]
        command = ["git", "-C", self.repository, *identity, *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()

    def commit(self, message: str, values: dict[str, Any]) -> float:
        """Commits the values of the environment; returns the time."""
        (self.repository / "environments/smoke/values.yaml").write_text(yaml.safe_dump(values))
        self.git("add", "--all")
        self.git("commit", "--quiet", "--message", message)
        return time.monotonic()

    def revert(self) -> float:
        self.git("revert", "--no-edit", "HEAD")
        return time.monotonic()

    # ---- processes ----

    def start(self) -> None:
        assert shutil.which("redis-server"), "Argo CD needs Redis: apt-get install redis-server"
        self.remove()
        self.spawn("redis-server", "--port", REDIS.rpartition(":")[2], "--bind", "127.0.0.1", "--save", "", "--dir", self.folder)
        self.publish_chart()
        self.install()
        settings = yaml.safe_load((ENVIRONMENTS / "platform/argocd/argocd-cm.yaml").read_text())["data"]
        # As the Deployments of controller and repo server hand them on.
        environment: dict[str, Any] = {"ARGOCD_RECONCILIATION_TIMEOUT": settings["timeout.reconciliation"]}
        environment |= {"ARGOCD_RECONCILIATION_JITTER": settings["timeout.reconciliation.jitter"], "ARGOCD_GPG_ENABLED": "false"}
        for name in ("TLS", "SSH"):
            folder = self.folder / name.lower()
            folder.mkdir()
            environment[f"ARGOCD_{name}_DATA_PATH"] = folder
        redis = ("--redis", REDIS)
        self.spawn("argocd-repo-server", *redis, "--disable-tls", "--client-ca-path", "", "--port", REPO_SERVER.rpartition(":")[2],
                   "--metrics-port", 8084, environment=environment)  # fmt: skip
        plaintext = ("--repo-server-plaintext", "--namespace", "argocd")
        # The reason for a resource's health, which else only the user interface shows, is written to the Application.
        self.spawn("argocd-application-controller", *redis, *plaintext, "--repo-server", REPO_SERVER, "--metrics-port", 8083,
                   "--persist-resource-health", environment=environment)  # fmt: skip
        self.spawn("argocd-applicationset-controller", *plaintext, "--argocd-repo-server", REPO_SERVER, "--metrics-addr",
                   "127.0.0.1:8085", "--probe-addr", "127.0.0.1:8086", "--webhook-addr", "127.0.0.1:8087")  # fmt: skip

    def spawn(self, name: str, *arguments: Any, environment: dict[str, Any] | None = None) -> None:
        """Argo CD's one binary is the program by whose name it is called."""
        program: Path | str = name
        if name.startswith("argocd-"):
            program = self.folder / name
            program.symlink_to(BIN / "argocd")
        path = f"{BIN}{os.pathsep}{os.environ['PATH']}"
        everything = os.environ | {"PATH": path, "KUBECONFIG": str(cluster.KUBECONFIG)}
        everything |= {key: str(value) for key, value in (environment or {}).items()}
        with (self.folder / f"{name}.log").open("wb") as log:
            command = [str(part) for part in (program, *arguments)]
            self.processes.append(subprocess.Popen(command, env=everything, stdout=log, stderr=log))

    def publish_chart(self) -> None:
        settings = {"version": 0.1, "log": {"level": "error"}, "http": {"addr": REGISTRY}}
        settings["storage"] = {"filesystem": {"rootdirectory": str(self.folder / "registry")}}
        file = self.folder / "registry.yaml"
        file.write_text(yaml.safe_dump(settings))
        self.spawn("registry", "serve", file, environment={"OTEL_TRACES_EXPORTER": "none"})
        cluster.run(BIN / "helm", "package", ROOT / "charts/ray-finetune", "--destination", self.folder)
        (archive,) = self.folder.glob("ray-finetune-*.tgz")
        push = [BIN / "helm", "push", archive, f"oci://{REGISTRY}/charts", "--plain-http"]
        wait("the registry takes the chart", lambda: subprocess.run(push, capture_output=True).returncode == 0, 60)

    # ---- objects ----

    def install(self) -> None:
        cluster.kubectl("apply", "--server-side", "-f", "-", input=yaml.safe_dump_all(lint_gitops.argocd_crds()))
        cluster.kubectl("create", "namespace", "argocd")
        make_namespace(NAMESPACE)
        names = ("argocd-cm", "argocd-rbac-cm", "argocd-ssh-known-hosts-cm", "argocd-tls-certs-cm", "argocd-gpg-keys-cm")
        self.apply([config_map(name) for name in names])
        self.apply([secret("argocd-secret", {"server.secretkey": secrets.token_hex(16)}, "argocd-secret")])
        for path in sorted((ENVIRONMENTS / "platform/argocd").glob("*.yaml")):
            cluster.kubectl("apply", "--server-side", "--force-conflicts", "--field-manager", "ray-finetune", "-f", path)
        kubeconfig = yaml.safe_load(cluster.KUBECONFIG.read_text())
        server = kubeconfig["clusters"][0]["cluster"]["server"]
        authority = Path(kubeconfig["clusters"][0]["cluster"]["certificate-authority"]).read_bytes()
        access = {"bearerToken": kubeconfig["users"][0]["user"]["token"], "tlsClientConfig": {"caData": encoded(authority)}}
        repository = {"type": "helm", "url": f"{REGISTRY}/charts", "name": "charts", "enableOCI": "true"}
        repository["insecureOCIForceHttp"] = "true"
        self.apply([
            secret("cluster", {"name": "local", "server": server, "config": json.dumps(access)}, "cluster"),
            secret("charts", repository, "repository"),
        ])  # fmt: skip
        for name in ("project.yaml", "applicationset.yaml"):
            text = (ENVIRONMENTS / name).read_text()
            for there, here in {
                "https://github.com/ray-finetune/ray-finetune.git": f"file://{self.repository}",
                "ghcr.io/ray-finetune/charts": f"{REGISTRY}/charts",
                "https://kubernetes.default.svc": server,
            }.items():
                assert there in text
                text = text.replace(there, here)
            cluster.kubectl("apply", "-f", "-", input=text)

    def apply(self, objects: list[dict[str, Any]]) -> None:
        cluster.kubectl("apply", "--server-side", "--force-conflicts", "-f", "-", input=yaml.safe_dump_all(objects))

    # ---- what it shows ----

    def application(self) -> dict[str, Any]:
        """The Application's status; empty until there is one."""
        found = cluster.kubectl("get", "applications.argoproj.io", "--namespace", "argocd", "--output", "json")
        items = [item for item in json.loads(found)["items"] if item["metadata"]["name"] == APPLICATION]
        return items[0].get("status", {}) if items else {}

    def state(self) -> tuple[str, str]:
        """Such as Synced and Healthy."""
        status = self.application()
        return status.get("sync", {}).get("status", ""), status.get("health", {}).get("status", "")

    def reason(self) -> str:
        """What Argo CD says of its only RayJob's health."""
        resources = self.application()["resources"]
        return next(each["health"]["message"] for each in resources if each["kind"] == "RayJob" and "health" in each)

    def jobs(self) -> dict[str, dict[str, Any]]:
        found = cluster.kubectl("get", "rayjobs", "--namespace", NAMESPACE, "--output", "json")
        return {item["metadata"]["name"]: item for item in json.loads(found)["items"]}

    def stop(self) -> None:
        for process in self.processes:
            process.terminate()
        for process in self.processes:
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                process.kill()
        self.remove()

    def remove(self) -> None:
        """What it has in the cluster. Without its controllers nothing makes it again, and KubeRay ends the run."""
        cluster.kubectl("delete", "namespace", "argocd", NAMESPACE, "--ignore-not-found", "--timeout", "180s")


def config_map(name: str) -> dict[str, Any]:
    metadata = {"name": name, "namespace": "argocd", "labels": {"app.kubernetes.io/part-of": "argocd"}}
    return {"apiVersion": "v1", "kind": "ConfigMap", "metadata": metadata}


def secret(name: str, data: dict[str, str], kind: str) -> dict[str, Any]:
    labels = {"app.kubernetes.io/part-of": "argocd", "argocd.argoproj.io/secret-type": kind}
    metadata = {"name": name, "namespace": "argocd", "labels": labels}
    values = {key: encoded(value.encode()) for key, value in data.items()}
    return {"apiVersion": "v1", "kind": "Secret", "metadata": metadata, "data": values}


def encoded(data: bytes) -> str:
    return base64.b64encode(data).decode()
