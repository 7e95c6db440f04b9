"""A real Kubernetes with KubeRay and an S3 server on this machine: `cluster.py up` and `down`; `check` whether it can be there,
`kueue` adds Kueue, and `load IMAGE` an image of buildah's.

Everything is in .cluster: logs, keys, data, and images, which alone stay there after `down`. The cluster's addresses are those of
a bridge, so nothing of it can be reached from outside. `up` needs root and Linux; it says what else is missing.
"""

import contextlib
import json
import os
import re
import secrets
import shutil
import socket
import string
import subprocess
import sys
import tarfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import daemons
import yaml

ROOT = Path(__file__).parents[2]
BIN = ROOT / ".tools/bin"
FOLDER = ROOT / ".cluster"
LOGS, PIDS = FOLDER / "logs", FOLDER / "pids"
KUBECONFIG = FOLDER / "kubeconfig"
CONFIG = Path(__file__).parent / "config"

NODE, BRIDGE = "local", "ray-finetune0"
ADDRESS, PODS, SERVICES = "10.222.0.1", "10.222.0.0/16", "10.223.0.0/16"
PORT = 26443
S3 = {"endpoint": f"http://{ADDRESS}:7070", "access": "test", "secret": "testsecret"}
PAUSE, OPERATOR, KUEUE = "localhost/pause:1", "localhost/kuberay-operator:1", "localhost/kueue:1"

COMMANDS = {  # with the Debian package that has it
    "buildah": "buildah",
    "conntrack": "conntrack",
    "debootstrap": "debootstrap",
    "gcc": "gcc",
    "ip": "iproute2",
    "ipset": "ipset",
    "iptables": "iptables",
    "openssl": "openssl",
    "runc": "runc",
}
CNI = Path("/usr/lib/cni")
OWN_RULES = re.compile("KUBE-(ROUTER|POD-FW|NWPLCY|FIREWALL|KUBELET-CANARY|IPTABLES-HINT)")
# Go templates for buildah: what an image is built on, and the number of its layers.
BASE_NAME = '{{index .OCIv1.Config.Labels "org.opencontainers.image.base.name"}}'
LAYERS = "{{len .OCIv1.RootFS.DiffIDs}}"
MOST_MB_ADDED = 150
LEAST_GIB_FREE = 12


def main() -> int:
    action, *arguments = sys.argv[1:]
    try:
        if action == "down":
            down()
        elif action == "load":
            load(*arguments)
        elif action == "kueue":
            install_kueue()
        elif action not in ("check", "up"):
            raise RuntimeError("what to do is check, up, kueue, load IMAGE or down")
        elif action == "up" and running():
            print(f"up already: export KUBECONFIG={KUBECONFIG}")
        elif problem := missing():
            print(f"make cluster: {problem}", file=sys.stderr)
            return 2
        elif action == "check":
            pass
        else:
            down()
            started = time.monotonic()
            up()
            print(f"ready after {time.monotonic() - started:.0f} s: export KUBECONFIG={KUBECONFIG}")
    except RuntimeError as error:
        print(f"cluster.py {action}: {error}", file=sys.stderr)
        if action == "up":
            down()
        return 1
    return 0


def missing() -> str | None:
    """What this machine lacks, in one sentence, or None."""
    if sys.platform != "linux" or os.geteuid() != 0:
        return "a Kubernetes of one's own needs Linux and root"
    held = int(
        next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("CapEff")).split()[1], 16
    )
    lacking = [name for name, bit in {"CAP_NET_ADMIN": 12, "CAP_SYS_ADMIN": 21}.items() if not held >> bit & 1]
    if lacking:
        return f"root lacks {' and '.join(lacking)} here (a container without privileges?); take a machine of its own"
    packages = {package for command, package in COMMANDS.items() if not shutil.which(command)}
    if not (CNI / "bridge").exists():
        packages.add("containernetworking-plugins")
    if packages:
        return f"apt-get install {' '.join(sorted(packages))}"
    controllers = Path("/sys/fs/cgroup/cgroup.controllers")  # of cgroup v2
    absent = [
        name
        for name in ("cpu", "memory", "pids")
        if not Path("/sys/fs/cgroup", name).is_dir() and not (controllers.exists() and name in controllers.read_text().split())
    ]
    if absent:
        return f"the kernel's cgroup controllers {', '.join(absent)} are not there"
    if not Path("/proc/sys/net/bridge/bridge-nf-call-iptables").exists():
        return "the kernel's br_netfilter is not there: modprobe br_netfilter"
    if answers() and not running():
        return "the cluster of another clone is up on this machine: make cluster-down there"
    if (free := shutil.disk_usage(ROOT).free / 2**30) < LEAST_GIB_FREE:
        return f"{free:.0f} GiB of disk are free here; images and builds want {LEAST_GIB_FREE}"
    if len(str(FOLDER)) > 70:  # of the 107 bytes that a socket's path may have
        return f"the path {FOLDER} is too long for sockets; clone into a shorter one"
    return None


def answers() -> bool:
    """Whether an API server is at the cluster's address."""
    if not Path("/sys/class/net", BRIDGE).exists():
        return False
    try:
        socket.create_connection((ADDRESS, PORT), 2).close()
    except OSError:
        return False
    return True


def running() -> bool:
    return KUBECONFIG.exists() and daemons.alive(PIDS, "kubelet") and kubectl_ok("get", "--raw", "/readyz")


# ---- up ----


def up() -> None:
    for name in ("logs", "pids", "pki", "run", "s3", "config/cni", "etcd", "kubelet"):
        (FOLDER / name).mkdir(parents=True, exist_ok=True)
    write_config()
    make_bridge()
    start_control_plane()
    start_node()
    start_s3()
    import_images()
    install_kuberay()
    wait("the node is Ready", lambda: kubectl_ok("wait", "--for=condition=Ready", f"node/{NODE}", "--timeout=1s"))
    # Not before the node is there: it enforces NetworkPolicies for it.
    start("kube-router", f"--kubeconfig={KUBECONFIG}", "--run-router=false", "--run-service-proxy=false", "--run-firewall=true",
          f"--hostname-override={NODE}", f"--service-cluster-ip-range={SERVICES}", "--health-port=0")  # fmt: skip
    operator = ("deployment/kuberay-operator", "--namespace=ray-system")
    wait("the KubeRay operator is available", lambda: kubectl_ok("wait", "--for=condition=Available", *operator, "--timeout=1s"))


def write_config() -> None:
    """Fills in config/ and makes the keys. The admin's token is the only one: all parts of the cluster use it."""
    token = secrets.token_hex(16)
    values = {"folder": FOLDER, "bin": BIN, "address": ADDRESS, "bridge": BRIDGE, "pods": PODS, "pause": PAUSE, "token": token}
    values |= {"cni": CNI, "runc": shutil.which("runc")}
    targets = {"cni.conflist": FOLDER / "config/cni/cni.conflist", "kubeconfig.yaml": KUBECONFIG}
    for path in CONFIG.iterdir():
        target = targets.get(path.name, FOLDER / "config" / path.name)
        target.write_text(string.Template(path.read_text()).substitute(values))
    (FOLDER / "pki/tokens.csv").write_text(f"{token},admin,admin,system:masters\n")
    for path in (KUBECONFIG, FOLDER / "pki/tokens.csv"):
        path.chmod(0o600)
    run("openssl", "genrsa", "-out", FOLDER / "pki/service-account.key", "2048")


# What leaves the pods' network does so under the machine's own address.
MASQUERADE = ["POSTROUTING", "--source", PODS, "!", "--destination", PODS, "--jump", "MASQUERADE"]


def make_bridge() -> None:
    run("ip", "link", "add", BRIDGE, "type", "bridge")
    run("ip", "address", "add", f"{ADDRESS}/16", "dev", BRIDGE)
    run("ip", "link", "set", BRIDGE, "up")
    for setting in ("net/ipv4/ip_forward", "net/bridge/bridge-nf-call-iptables"):
        Path("/proc/sys", setting).write_text("1")
    run("iptables", "--table", "nat", "--append", *MASQUERADE)


def start_control_plane() -> None:
    etcd, peers = "http://127.0.0.1:22379", "http://127.0.0.1:22380"
    start("etcd", "--data-dir", FOLDER / "etcd", "--unsafe-no-fsync", "--log-level=warn",
          f"--listen-client-urls={etcd}", f"--advertise-client-urls={etcd}", f"--listen-peer-urls={peers}",
          f"--initial-advertise-peer-urls={peers}", f"--initial-cluster=default={peers}")  # fmt: skip
    start("containerd", "--config", FOLDER / "config/containerd.toml")
    key = FOLDER / "pki/service-account.key"
    start("kube-apiserver", f"--etcd-servers={etcd}", f"--cert-dir={FOLDER}/pki", f"--bind-address={ADDRESS}", f"--secure-port={PORT}",
          f"--advertise-address={ADDRESS}", f"--service-cluster-ip-range={SERVICES}", "--endpoint-reconciler-type=none",
          "--authorization-mode=RBAC", f"--token-auth-file={FOLDER}/pki/tokens.csv",
          "--service-account-issuer=https://kubernetes.default.svc", f"--service-account-key-file={key}",
          f"--service-account-signing-key-file={key}", "--kubelet-preferred-address-types=InternalIP")  # fmt: skip
    wait("the API server answers", lambda: kubectl_ok("get", "--raw", "/readyz"))
    start("kube-controller-manager", f"--kubeconfig={KUBECONFIG}", f"--service-account-private-key-file={key}",
          f"--root-ca-file={FOLDER}/pki/apiserver.crt", "--use-service-account-credentials", "--leader-elect=false",
          "--secure-port=0")  # fmt: skip
    start("kube-scheduler", f"--kubeconfig={KUBECONFIG}", "--leader-elect=false", "--secure-port=0")
    kubectl("apply", "-f", FOLDER / "config/kubernetes.yaml")


def start_node() -> None:
    wait("containerd answers", lambda: ctr_ok("version"))
    start("kubelet", f"--config={FOLDER}/config/kubelet.yaml", f"--kubeconfig={KUBECONFIG}", f"--root-dir={FOLDER}/kubelet",
          f"--cert-dir={FOLDER}/pki", f"--hostname-override={NODE}", f"--node-ip={ADDRESS}")  # fmt: skip
    start("kube-proxy", f"--kubeconfig={KUBECONFIG}", "--proxy-mode=iptables", f"--cluster-cidr={PODS}", "--conntrack-max-per-core=0",
          f"--hostname-override={NODE}")  # fmt: skip
    start("coredns", "-conf", FOLDER / "config/Corefile")


def start_s3() -> None:
    start("versitygw", "--access", S3["access"], "--secret", S3["secret"], "--port", f"{ADDRESS}:7070", "posix", FOLDER / "s3")


def stop_s3() -> None:
    daemons.stop(PIDS, "versitygw")


def import_images() -> None:
    """What the chart and the cluster name, built from the pinned modules; those that are there already stay."""
    values = yaml.safe_load((ROOT / "charts/ray-finetune/values.yaml").read_text())
    images: dict[str, tuple[str, Callable[[], Path]]] = {
        PAUSE: ("pause", build_pause),
        OPERATOR: ("manager", lambda: BIN / "kuberay-operator"),
        values["submitter"]["image"]: ("submitter", lambda: BIN / "kuberay-submitter"),
    }
    present = ctr("images", "list", "--quiet").split()
    for reference, (name, binary) in images.items():
        if reference not in present:
            import_image(reference, name, binary())


def build_pause() -> Path:
    """The process that holds a pod's namespaces."""
    pause = FOLDER / "run/pause"
    source = module("kubernetes", "k8s.io/kubernetes") / "build/pause/linux/pause.c"
    run("gcc", "-Os", "-static", "-DVERSION=1", "-o", pause, source)
    return pause


def import_image(reference: str, name: str, binary: Path) -> None:
    """An image of nothing but one static program."""
    container = run("buildah", "from", "scratch").strip()
    archive = FOLDER / "run/image.tar"
    try:
        run("buildah", "copy", container, binary, f"/{name}")
        run("buildah", "config", "--entrypoint", json.dumps([f"/{name}"]), "--user", "65532:65532", container)
        run("buildah", "commit", "--quiet", container, f"docker-archive:{archive}:{reference}")
        ctr("images", "import", archive)
    finally:
        archive.unlink(missing_ok=True)
        run("buildah", "rm", container)


def load(reference: str) -> None:
    """Puts an image that buildah built where pods find it, once for each image."""
    image = run("buildah", "inspect", "--type", "image", "--format", "{{.FromImageID}}", reference).strip()
    if f"sha256:{image}" in ctr("images", "list", "--quiet").split():
        return
    lines = [line.split() for line in ctr("images", "list").splitlines()]
    old = {line[2] for line in lines if line[0] == reference}
    for line in lines:
        if line[2] in old:  # its two names: else its layers would stay for ever
            ctr("images", "remove", line[0])
    archive = FOLDER / "run/image.tar"
    try:
        run("buildah", "push", "--quiet", reference, f"docker-archive:{archive}:{reference}")
        check_size(reference, archive)
        ctr("images", "import", archive)
    finally:
        archive.unlink(missing_ok=True)


def check_size(reference: str, archive: Path) -> None:
    """RuntimeError where the layers on top of the image's base are too large for a node that has the base already."""
    base = run("buildah", "inspect", "--type", "image", "--format", BASE_NAME, reference).strip()
    below = int(run("buildah", "inspect", "--type", "image", "--format", LAYERS, base))
    with tarfile.open(archive) as files:
        manifest = json.loads(files.extractfile("manifest.json").read())  # pyright: ignore[reportOptionalMemberAccess]
        sizes = [files.getmember(layer).size / 1e6 for layer in manifest[0]["Layers"]]
    added = sizes[below:]
    print(f"{reference}: {sum(added):.1f} MB on top of {base} ({' + '.join(f'{size:.1f}' for size in added)})")
    if sum(added) > MOST_MB_ADDED:
        raise RuntimeError(f"{reference}: layers of {sum(added):.1f} MB on top of its base; at most {MOST_MB_ADDED} are allowed")


def install_kuberay() -> None:
    kubectl("create", "namespace", "ray-system")
    install("kuberay", module("kuberay", "github.com/ray-project/kuberay/ray-operator"), OPERATOR, namespace="ray-system")


def install_kueue() -> None:
    """Kueue, beside what `up` has started."""
    if KUEUE not in ctr("images", "list", "--quiet").split():
        import_image(KUEUE, "manager", BIN / "kueue")
    install("kueue", module("kueue", "sigs.k8s.io/kueue"), KUEUE)
    controller = ("deployment/kueue-controller-manager", "--namespace=kueue-system")
    wait("Kueue is available", lambda: kubectl_ok("wait", "--for=condition=Available", *controller, "--timeout=1s"))


def install(name: str, source: Path, image: str, **fields: str) -> None:
    """The manifests of a module; their Deployment has the image that is here, asks for no room, and is ready as soon as it answers."""
    folder = FOLDER / "config" / name
    folder.mkdir(exist_ok=True)
    changes = {"image": image, "imagePullPolicy": "Never", "resources": {}}
    changes |= {"readinessProbe/initialDelaySeconds": 0, "readinessProbe/periodSeconds": 1}
    container = "/spec/template/spec/containers/0"
    patch = [{"op": "add", "path": f"{container}/{path}", "value": value} for path, value in changes.items()]
    # Kueue's own API server (its visibility API) would want front-proxy certificates, and without them no namespace ever ends.
    gone = {"$patch": "delete", "apiVersion": "apiregistration.k8s.io/v1", "kind": "APIService", "metadata": {"name": "any"}}
    patches = [
        {"target": {"kind": kind}, "patch": json.dumps(each)} for kind, each in (("Deployment", patch), ("APIService", gone))
    ]
    kustomization = {"resources": [os.path.relpath(source / "config/default", folder)], "patches": patches} | fields
    (folder / "kustomization.yaml").write_text(json.dumps(kustomization))
    kubectl("apply", "--server-side", "-k", folder)


# ---- down ----


def down() -> None:
    """Ends what `up` has started, and nothing else, and takes away what it made, but for the images."""
    daemons.stop(PIDS, "kubelet")
    for task in ctr_lines("tasks", "list", "--quiet"):
        ctr_ok("tasks", "delete", "--force", task)
    for container in ctr_lines("containers", "list", "--quiet"):
        ctr_ok("containers", "delete", container)
    if daemons.alive(PIDS, "kube-proxy"):
        daemons.stop(PIDS, "kube-proxy")
        quietly(BIN / "kube-proxy", "--cleanup")
    for path in sorted(PIDS.glob("*")):
        daemons.stop(PIDS, path.name)
    for mount in mounts():
        quietly("umount", "--lazy", mount)
    if not answers():  # else network and firewall are another clone's
        take_down_network()
    for group in sorted(Path("/sys/fs/cgroup").glob("*/kubepods/**/"), reverse=True):
        with contextlib.suppress(OSError):  # one that is in use is another kubelet's
            group.rmdir()
    for name in ("pids", "pki", "run", "s3", "config", "etcd", "kubelet", "kubeconfig"):
        path = FOLDER / name
        path.unlink() if path.is_file() else shutil.rmtree(path, ignore_errors=True)


def take_down_network() -> None:
    if Path("/sys/class/net", BRIDGE).exists():
        run("ip", "link", "delete", BRIDGE)
    while quietly("iptables", "--table", "nat", "--delete", *MASQUERADE):
        pass
    # kube-router's own cleanup leaves its rules, and the kubelet has none.
    for table in ("nat", "mangle", "filter"):
        rules = run("iptables-save", "--table", table).splitlines(keepends=True)
        run("iptables-restore", "--table", table, input="".join(rule for rule in rules if not OWN_RULES.search(rule)))


def mounts() -> list[str]:
    """Mounted below .cluster, innermost first."""
    points = [line.split()[1] for line in Path("/proc/mounts").read_text().splitlines()]
    return sorted((point for point in points if point.startswith(f"{FOLDER}/")), reverse=True)


# ---- commands ----


def start(name: str, *arguments: Any) -> None:
    environment = os.environ | {"PATH": f"{BIN}{os.pathsep}{os.environ['PATH']}", "KUBECONFIG": str(KUBECONFIG)}
    daemons.start(PIDS, LOGS, name, [str(BIN / name), *map(str, arguments)], environment)


def wait(what: str, check: Callable[[], bool], seconds: float = 120) -> None:
    """RuntimeError where `check` has not come true in time, or a process of the cluster has ended meanwhile."""
    deadline = time.monotonic() + seconds
    while not check():
        ended = [path.name for path in PIDS.glob("*") if not daemons.alive(PIDS, path.name)]
        if ended or time.monotonic() > deadline:
            why = f"{' and '.join(ended)} ended" if ended else f"not true after {seconds:.0f} s: {what}"
            raise RuntimeError(f"{why}; logs are in {LOGS}")
        time.sleep(0.3)


def kubectl(*arguments: Any, input: str | None = None) -> str:
    return run(BIN / "kubectl", "--kubeconfig", KUBECONFIG, *arguments, input=input)


def kubectl_ok(*arguments: Any) -> bool:
    return quietly(BIN / "kubectl", "--kubeconfig", KUBECONFIG, *arguments)


CTR = [BIN / "ctr", "--address", FOLDER / "run/containerd.sock", "--namespace", "k8s.io"]


def ctr(*arguments: Any) -> str:
    return run(*CTR, *arguments)


def ctr_ok(*arguments: Any) -> bool:
    return quietly(*CTR, *arguments)


def ctr_lines(*arguments: Any) -> list[str]:
    """Nothing where containerd does not run."""
    return (
        subprocess.run([*CTR, *arguments], capture_output=True, text=True).stdout.split()
        if daemons.alive(PIDS, "containerd")
        else []
    )


def quietly(*command: Any) -> bool:
    """Whether a command succeeds."""
    return subprocess.run([str(part) for part in command], capture_output=True).returncode == 0


def module(group: str, name: str) -> Path:
    """The folder of a Go module that a tool is built from."""
    command = ["go", "list", "-C", str(ROOT / "tests/tools" / group), "-m", "-f", "{{.Dir}}", name]
    return Path(run(*command, env=os.environ | {"GOWORK": "off"}).strip())


def run(*command: Any, input: str | None = None, env: dict[str, str] | None = None) -> str:
    done = subprocess.run([str(part) for part in command], input=input, env=env, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{' '.join(map(str, command))}: {done.stderr.strip()}")
    return done.stdout


if __name__ == "__main__":
    sys.exit(main())
