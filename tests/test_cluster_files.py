"""The files that start clusters: Ray's own schema and preparation, KubeRay's keys, their commands, nothing secret."""

from __future__ import annotations

import copy
import re
import shlex
import subprocess
import tomllib
from pathlib import Path
from typing import Any

import click
import jsonschema
import pytest
import yaml
from packaging.requirements import Requirement
from ray._common.network_utils import is_localhost
from ray.autoscaler._private.kuberay.autoscaling_config import _derive_autoscaling_config_from_ray_cr
from ray.autoscaler._private.util import prepare_config, validate_config

from dhp_ray.config import CONF, ConfigError, load
from tests.readme import DOCUMENTS, ROOT

LAUNCH = sorted((CONF / "cluster" / "launch").glob("*.yaml"))
RAY_UP = [ROOT / "cluster.yaml", *(path for path in LAUNCH if not path.name.startswith("kuberay"))]
KUBERAY = [path for path in LAUNCH if path.name.startswith("kuberay")]


def tree(path: Path) -> dict[str, Any]:
    return yaml.safe_load(path.read_text())


def name(path: Path) -> str:
    return path.name


def only(required: str = "", **properties: Any) -> dict[str, Any]:
    """A JSON schema: an object with these keys and no others."""
    return {"type": "object", "additionalProperties": False, "properties": properties, "required": required.split()}


def some(item: dict[str, Any]) -> dict[str, Any]:
    return {"type": "array", "items": item, "minItems": 1}


# What KubeRay 1.7 (ray.io/v1) and Kubernetes (core/v1) admit, as far as our manifests go.
TEXT, NUMBER, FLAG, ANY = {"type": "string"}, {"type": "integer", "minimum": 0}, {"type": "boolean"}, {"type": "object"}
TEXTS = {"type": "object", "additionalProperties": TEXT}  # start parameters, resources: numbers must be quoted
CONTAINER = only("name image resources", name=TEXT, image=TEXT, env=some(only("name value", name=TEXT, value=TEXT)),
                 ports=some(only("containerPort name", containerPort=NUMBER, name={"type": "string", "maxLength": 15})),
                 resources=only("requests limits", requests=TEXTS, limits=TEXTS),
                 volumeMounts=some(only("name mountPath", name=TEXT, mountPath=TEXT)))
VOLUME = only("name", name=TEXT, persistentVolumeClaim=only("claimName", claimName=TEXT),
              emptyDir=only(medium={"enum": ["Memory"]}, sizeLimit=TEXT))
POD = only("spec", spec=only("containers", containers=some(CONTAINER), volumes=some(VOLUME)))
CLUSTER = only(
    "rayVersion headGroupSpec workerGroupSpecs", rayVersion=TEXT, enableInTreeAutoscaling=FLAG,
    authOptions=only("mode", mode={"enum": ["disabled", "token"]}),
    autoscalerOptions=only(version={"enum": ["v1", "v2"]},
                           upscalingMode={"enum": ["Default", "Aggressive", "Conservative"]},
                           idleTimeoutSeconds=NUMBER),
    networkPolicy=only("mode", mode={"enum": ["DenyAll", "DenyAllIngress", "DenyAllEgress"]}),
    headGroupSpec=only("template", serviceType={"enum": ["ClusterIP"]}, rayStartParams=TEXTS, template=POD),
    workerGroupSpecs=some(only("groupName minReplicas maxReplicas template", groupName=TEXT, rayStartParams=TEXTS,
                               replicas=NUMBER, minReplicas=NUMBER, maxReplicas=NUMBER, template=POD)))
SPECS = {"RayCluster": CLUSTER,
         "RayJob": only("entrypoint rayClusterSpec", entrypoint=TEXT,
                        submissionMode={"enum": ["K8sJobMode", "HTTPMode"]}, backoffLimit=NUMBER,
                        shutdownAfterJobFinishes=FLAG, ttlSecondsAfterFinished=NUMBER, rayClusterSpec=CLUSTER)}


def check_manifest(manifest: dict[str, Any]) -> None:
    schema = only("apiVersion kind metadata spec", apiVersion={"const": "ray.io/v1"}, kind={"enum": list(SPECS)},
                  metadata=only("name namespace", name=TEXT, namespace=TEXT), spec=SPECS.get(manifest["kind"], ANY))
    jsonschema.validate(manifest, schema)
    cluster = manifest["spec"].get("rayClusterSpec", manifest["spec"])
    # Ray's reading of it; it ends with validate_config
    _derive_autoscaling_config_from_ray_cr({"metadata": manifest["metadata"], "spec": cluster})
    for group in [cluster["headGroupSpec"], *cluster["workerGroupSpecs"]]:
        pod = group["template"]["spec"]
        mounted = {mount["name"] for container in pod["containers"] for mount in container.get("volumeMounts", [])}
        assert mounted == {volume["name"] for volume in pod.get("volumes", [])}


def check_config(config: dict[str, Any]) -> dict[str, Any]:
    """As `ray up` does before it asks a provider for anything."""
    prepared = prepare_config(copy.deepcopy(config))
    validate_config(prepared)
    for command in commands(prepared):
        check_start(command)
    return prepared


def commands(config: dict[str, Any]) -> list[str]:
    return [command for key, value in config.items() if key.endswith("_commands") for command in value]


def check_start(command: str) -> None:
    """Every option of a `ray start` is one that the installed Ray has."""
    from ray.scripts.scripts import start

    known = {option for parameter in start.params for option in parameter.opts}
    words = shlex.split(command, comments=True)
    for place in [index for index in range(len(words)) if words[index:index + 2] == ["ray", "start"]]:
        for word in words[place + 2:]:
            if word.startswith("-") and word.partition("=")[0] not in known:
                raise ValueError(f"ray start has no option {word}")


@pytest.mark.parametrize("path", RAY_UP, ids=name)
def test_ray_takes_the_file(path: Path) -> None:
    check_config(tree(path))


@pytest.mark.parametrize("path", RAY_UP, ids=name)
def test_the_dashboard_listens_where_the_tunnel_ends(path: Path) -> None:
    """`ray dashboard FILE` forwards a port to `localhost` on the head, and no other address."""
    from ray.scripts.scripts import dashboard, start

    words = shlex.split(tree(path)["head_start_ray_commands"][1])
    given = start.make_context("start", words[words.index("start") + 1:]).params
    assert is_localhost(given["dashboard_host"])
    assert given["dashboard_port"] == dashboard.make_context("dashboard", [str(path)]).params["remote_port"]


@pytest.mark.parametrize("path", RAY_UP, ids=name)
@pytest.mark.parametrize("place", [
    (), ("auth",), ("provider", "head_ip"), ("head_start_ray_commands",), ("max_workers",)], ids=str)
def test_a_planted_mistake_fails(path: Path, place: tuple[str, ...]) -> None:
    config = tree(path)
    match place:
        case ():
            config["head_start_commands"] = []
        case ("auth",):
            config["auth"]["ssh_usr"] = "root"
        case ("provider", key):
            if key in config["provider"]:
                del config["provider"][key]
            else:
                config["available_node_types"]["head"]["max_worker"] = 1
        case ("head_start_ray_commands",):
            config["head_start_ray_commands"][1] += " --dashboard-adress=127.0.0.1"
        case ("max_workers",):
            config["max_workers"] = "four"
    with pytest.raises((jsonschema.ValidationError, ValueError, TypeError, click.ClickException)):
        check_config(config)


@pytest.mark.parametrize("path", KUBERAY, ids=name)
def test_kuberay_takes_the_manifest(path: Path) -> None:
    check_manifest(tree(path))


@pytest.mark.parametrize("path", KUBERAY, ids=name)
@pytest.mark.parametrize("place", ["spec", "cluster", "worker", "container", "number", "volume"])
def test_a_planted_mistake_in_a_manifest_fails(path: Path, place: str) -> None:
    manifest = tree(path)
    cluster = manifest["spec"].get("rayClusterSpec", manifest["spec"])
    container = cluster["workerGroupSpecs"][0]["template"]["spec"]["containers"][0]
    match place:
        case "spec":
            manifest["spec"]["entrypoints"] = "python"
        case "cluster":
            cluster["headGroup"] = {}
        case "worker":
            cluster["workerGroupSpecs"][0]["maxReplica"] = 3
        case "container":
            container["resource"] = {}
        case "number":
            container["resources"]["limits"]["nvidia.com/gpu"] = 8
        case "volume":
            container["volumeMounts"].append({"name": "data", "mountPath": "/data"})
    with pytest.raises((jsonschema.ValidationError, AssertionError)):
        check_manifest(manifest)


def submitted(path: Path) -> list[list[str]]:
    """The arguments of every `jobs/train.py` in a file's comments, and in a RayJob's entrypoint. The image's checkout
    is this one.
    """
    comments = "\n".join(line.lstrip("# ") for line in path.read_text().splitlines() if line.startswith("#"))
    lines = comments.replace("\\\n", " ").splitlines()
    if path in KUBERAY:
        lines.append(tree(path)["spec"].get("entrypoint", ""))
    commands = [match[1] for line in lines if (match := re.search(r"python \S*jobs/train\.py(.*)", line))]
    return [shlex.split(command.replace("/home/ray/dhp_ray", str(ROOT))) for command in commands]


@pytest.mark.parametrize("path", [ROOT / "cluster.yaml", *LAUNCH], ids=name)
def test_what_is_submitted_suits_a_real_model(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The settings of a fine-tuning, not the demo's of conf/train.yaml; files that every node reaches."""
    monkeypatch.chdir(ROOT)
    [arguments] = submitted(path)
    config = load(arguments)  # also refuses fp32 on a GPU
    assert config.model.path
    assert config.train.learning_rate <= 1e-4
    assert config.planner.tokens_per_rank == "auto"
    assert config.train.precision == "bf16"
    assert config.cluster.device == ("npu" if path.parent == ROOT else "cuda")
    assert all(place.startswith(("/", "s3://")) for place in (config.run.dir, config.data.path, config.model.path))


def test_a_planted_demo_setting_shows(tmp_path: Path) -> None:
    """What submits without `--config conf/finetune.yaml` is refused, or has the demo's settings."""
    planted = tmp_path / "nvidia.yaml"
    original = (CONF / "cluster" / "launch" / "nvidia.yaml").read_text()
    planted.write_text(original.replace("--config conf/finetune.yaml ", ""))
    [arguments] = submitted(planted)
    with pytest.raises(ConfigError, match=r"train\.precision: got 'fp32' with cluster\.device=cuda"):
        load(arguments)
    assert load([*arguments, "cluster.device=npu"]).planner.tokens_per_rank == "480"


def test_a_job_asks_for_the_workers_that_its_cluster_has() -> None:
    path = CONF / "cluster" / "launch" / "kuberay_job.yaml"
    assert tree(path)["spec"]["entrypoint"].startswith("python /home/ray/dhp_ray/jobs/train.py ")
    groups = tree(path)["spec"]["rayClusterSpec"]["workerGroupSpecs"]
    gpus = 0
    for group in groups:
        [container] = group["template"]["spec"]["containers"]
        gpus += group["replicas"] * int(container["resources"]["limits"]["nvidia.com/gpu"])
    assert load(submitted(path)[0]).cluster.num_workers == gpus


def test_what_is_the_users_own_stays_here() -> None:
    """The folders that the documented commands make go neither with a job, nor to the nodes, nor into an image."""
    kept = {".venv", "runs", "my"}
    for file in (".gitignore", ".rayignore", ".dockerignore"):
        assert kept <= {line.rstrip("/") for line in (ROOT / file).read_text().splitlines()}, file
    for path in RAY_UP:
        assert kept <= set(tree(path)["rsync_exclude"]), path


@pytest.mark.parametrize("path", [ROOT / "cluster.yaml", *LAUNCH], ids=name)
def test_versions_are_pinned_and_the_projects(path: Path) -> None:
    text = path.read_text()
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    lines = [*project["dependencies"], *project["optional-dependencies"]["npu"]]
    wanted = {line.name: line for line in map(Requirement, lines)}
    pins = {match[1]: match[2] for match in re.finditer(r'"(\w+)(?:\[[\w,]+\])?==([\w.]+)"', text)}
    if path in KUBERAY:
        manifest = tree(path)
        pins["ray"] = manifest["spec"].get("rayClusterSpec", manifest["spec"])["rayVersion"]
        assert f"rayproject/ray:{pins['ray']}-py311" in text
    else:
        assert {"ray", "torch", "transformers"} <= set(pins)
    for package, version in pins.items():
        assert wanted[package].specifier.contains(version), (package, version)
    assert pins["ray"] == "2.60.0", "one Ray version in all files"
    assert f'`pip install "ray[default,train]=={pins["ray"]}"`' in DOCUMENTS, "and where jobs are submitted from"


@pytest.mark.parametrize("path", [ROOT / "cluster.yaml", *LAUNCH], ids=name)
def test_nodes_have_the_files_of_conf(path: Path) -> None:
    """Which lie beside the package: only an editable installation finds them."""
    installs = re.findall(r"pip install .*/dhp_ray\S*$", path.read_text(), re.MULTILINE)
    assert installs
    extra = r"" if path == ROOT / "cluster.yaml" else r"\[cuda\]"  # Liger: no marker of a dependency can see CUDA
    assert [line for line in installs if not re.search(rf" -e [\w/~]+/dhp_ray{extra}$", line)] == []


@pytest.mark.parametrize("path", KUBERAY, ids=name)
def test_the_images_user_owns_the_checkout(path: Path) -> None:
    """Ray's images run as `ray` of the group `users`, who writes `dhp_ray.egg-info` there to install it editable."""
    assert re.findall(r"COPY (.*?) +/ ", path.read_text()) == ["--chown=ray:users . /home/ray/dhp_ray"]


@pytest.mark.parametrize("path", [ROOT / "cluster.yaml", *LAUNCH], ids=name)
def test_nothing_is_open_and_nothing_is_secret(path: Path) -> None:
    text = path.read_text()
    assert "0.0.0.0" not in text
    assert not re.search(r"AKIA|PRIVATE KEY|RAY_AUTH_TOKEN=[^$]|password", text)
    assert "REPLACE" in text
    assert "GLOO_SOCKET_IFNAME" in text
    if path in RAY_UP:
        assert text.count("--node-ip-address=$PRIVATE_IP") == 2
        assert "RAY_AUTH_MODE=token" in text
        assert tree(path)["file_mounts"]["~/.ray/auth_token"] == "~/.ray/auth_token"
    else:
        cluster = tree(path)["spec"].get("rayClusterSpec", tree(path)["spec"])
        assert cluster["authOptions"] == {"mode": "token"}
        assert cluster["headGroupSpec"]["serviceType"] == "ClusterIP"
        assert cluster["networkPolicy"] == {"mode": "DenyAllIngress"}
        gate = "featureGates[0].name=RayClusterNetworkPolicy"
        assert gate in text, "KubeRay 1.7 refuses networkPolicy without its gate"


def test_ascend_nodes_get_their_environment() -> None:
    config = tree(ROOT / "cluster.yaml")
    environment = next(command for command in config["setup_commands"] if "dhp_ray_environment" in command)
    for variable in ("HCCL_IF_IP", "HCCL_SOCKET_IFNAME", "HCCL_CONNECT_TIMEOUT", "HCCL_EXEC_TIMEOUT", "HCCL_BUFFSIZE"):
        assert f"export {variable}=" in environment
    assert any("torch_npu" in command for command in config["worker_setup_commands"])
    on_the_head = "\n".join(config["setup_commands"])
    assert "torch_npu" not in on_the_head, "without CANN, torch_npu breaks the head's torch"


@pytest.mark.parametrize("path", [ROOT / "cluster.yaml", *LAUNCH], ids=name)
def test_devices_keep_memory_in_segments_that_grow(path: Path) -> None:
    """Packs differ in size from step to step."""
    if path in KUBERAY:
        cluster = tree(path)["spec"].get("rayClusterSpec", tree(path)["spec"])
        for group in cluster["workerGroupSpecs"]:
            [container] = group["template"]["spec"]["containers"]
            assert {"name": "PYTORCH_ALLOC_CONF", "value": "expandable_segments:True"} in container["env"]
    else:
        name = "PYTORCH_NPU_ALLOC_CONF" if path.parent == ROOT else "PYTORCH_ALLOC_CONF"
        environment = next(text for text in tree(path)["setup_commands"] if "dhp_ray_environment" in text)
        assert f"export {name}=expandable_segments:True" in environment


@pytest.mark.parametrize("path", [ROOT / "cluster.yaml", *LAUNCH], ids=name)
def test_no_process_of_ray_yields_to_others(path: Path) -> None:
    """Neither a rank nor the driver, which runs on the head."""
    if path in KUBERAY:
        cluster = tree(path)["spec"].get("rayClusterSpec", tree(path)["spec"])
        for group in (cluster["headGroupSpec"], *cluster["workerGroupSpecs"]):
            [container] = group["template"]["spec"]["containers"]
            assert {"name": "RAY_worker_niceness", "value": "0"} in container["env"]
    else:
        assert "export RAY_worker_niceness=0" in "".join(tree(path)["setup_commands"])


@pytest.mark.parametrize("path", RAY_UP, ids=name)
def test_the_shell_can_read_every_command(path: Path, tmp_path: Path) -> None:
    """Syntax of all, and the environment file for what it sets, with an `ip` that answers as on a node."""
    config = tree(path)
    for command in commands(config):
        subprocess.run(["bash", "-n", "-c", command], check=True)
    (tmp_path / "ip").write_text("#!/bin/sh\n[ \"$3\" = route ] && echo 'default via 192.0.2.1 dev eth0 proto dhcp' "
                                 "|| echo '2: eth0    inet 192.0.2.11/24 brd 192.0.2.255 scope global eth0'\n")
    (tmp_path / "ip").chmod(0o755)
    environment = next(command for command in config["setup_commands"] if "dhp_ray_environment" in command)
    program = f"{environment}\n. ~/dhp_ray_environment\nprintenv PRIVATE_IP GLOO_SOCKET_IFNAME RAY_AUTH_MODE"
    done = subprocess.run(["bash", "-c", program], env={"HOME": str(tmp_path), "PATH": f"{tmp_path}:/usr/bin:/bin"},
                          capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["192.0.2.11", "eth0", "token"]


@pytest.mark.parametrize("path", sorted((CONF / "cluster").glob("*.yaml")), ids=name)
def test_the_files_that_cluster_chooses_are_configuration(path: Path) -> None:
    load([f"cluster={path.stem}"])


def test_each_file_is_of_one_kind() -> None:
    """conf/cluster/*.yaml are chosen by cluster=NAME; launch/ holds what starts clusters, simulated/ what
    jobs/simulate.py knows."""
    launch = {"nvidia.yaml", "aws_spot.yaml", "kuberay_cluster.yaml", "kuberay_job.yaml"}
    assert {path.name for path in LAUNCH} == launch
    folder = CONF / "cluster"
    assert {*folder.rglob("*.yaml")} == {*folder.glob("*.yaml"), *LAUNCH, *(folder / "simulated").glob("*.yaml")}
