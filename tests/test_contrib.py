"""The containers: what the compose file says hangs together, and its commands run as they stand
there but for folders, hosts and ports."""

from __future__ import annotations

import json
import re
import signal
import tomllib
import urllib.request
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import yaml
from typer.testing import CliRunner

from datastreamer.cli.program import program as datastreamer
from datastreamer.client.blocking_client import BlockingClient
from tests.cli.process import Running, running

ROOT = Path(__file__).resolve().parent.parent
CONTRIB = ROOT / "contrib"
DOCKER = CONTRIB / "docker"
COMPOSE: Any = yaml.safe_load((DOCKER / "compose.yaml").read_text())
SERVICES: Any = COMPOSE["services"]
PROMETHEUS: Any = yaml.safe_load((DOCKER / "prometheus.yml").read_text())
METRICS_PORT = 9600
WITH_S3: Any = yaml.safe_load((DOCKER / "compose.archive.yaml").read_text())


def manifests(name: str) -> Any:
    return list(yaml.safe_load_all((CONTRIB / "kubernetes" / name).read_text()))


KUBERNETES: Any = manifests("relay.yaml")


def taken(port: int) -> list[int]:
    with BlockingClient("127.0.0.1", port) as client:
        return [entry.number for entry in client.entries(stop=20)]


def targets() -> list[str]:
    [job] = PROMETHEUS["scrape_configs"]
    [static] = job["static_configs"]
    found: list[str] = static["targets"]
    return found


def test_the_workflow_runs_each_python_that_the_package_names() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    prefix = "Programming Language :: Python :: 3."
    named = [each.split(" :: ")[-1] for each in project["classifiers"] if each.startswith(prefix)]
    workflow = yaml.safe_load((ROOT / ".github" / "workflows" / "test.yml").read_text())
    assert workflow["jobs"]["versions"]["strategy"]["matrix"]["python"] == named
    assert project["requires-python"] == f">={named[0]}"


def test_the_gate_names_tests_that_exist() -> None:
    named = re.findall(r"tests/[\w/]+\.py", (ROOT / ".ci" / "run").read_text())
    assert named
    assert [each for each in named if not (ROOT / each).exists()] == []


def test_the_workflow_runs_all_parts_of_the_checks() -> None:
    workflow = yaml.safe_load((ROOT / ".github" / "workflows" / "test.yml").read_text())
    [parts] = re.findall(r"^parts=\((.*)\)$", (ROOT / ".ci" / "run").read_text(), re.MULTILINE)
    matrix = workflow["jobs"]["parts"]["strategy"]["matrix"]["part"]
    assert {"run": ".ci/run tests"} in workflow["jobs"]["versions"]["steps"]
    assert "4.0" in workflow["jobs"]["spark"]["strategy"]["matrix"]["spark"]
    assert ["tests", "oldest_spark", *" ".join(matrix).split()] == parts.split()


def test_the_compose_file_hangs_together() -> None:
    assert set(SERVICES) == {"sequencer", "relay-1", "relay-2", "prometheus", "grafana"}
    named = set()
    mounted = {}
    for service in SERVICES.values():
        assert service["restart"] == "unless-stopped"
        assert "image" not in service or re.fullmatch(
            r"datastreamer|.*:v?\d+\.\d+\.\d+", service["image"]
        )
        assert set(service.get("depends_on", ())) <= set(SERVICES)
        for volume in service["volumes"]:
            source, target, *_ = volume.split(":")
            if source.startswith("."):
                assert (DOCKER / source).exists(), source
                mounted[target] = DOCKER / source
            else:
                named.add(source)
    assert named == set(COMPOSE["volumes"])
    assert (DOCKER / SERVICES["sequencer"]["build"]["context"]).resolve() == CONTRIB.parent
    assert (CONTRIB.parent / SERVICES["sequencer"]["build"]["dockerfile"]).is_file()
    # Prometheus finds its own files, and alerts for the job by its name.
    [config] = [word for word in SERVICES["prometheus"]["command"] if "config.file" in word]
    at = Path(config.partition("=")[2])
    assert mounted[str(at)].samefile(DOCKER / "prometheus.yml")
    for rules in PROMETHEUS["rule_files"]:
        alerts = yaml.safe_load(mounted[str(at.parent / rules)].read_text())
        expressions = [rule["expr"] for group in alerts["groups"] for rule in group["rules"]]
        job = PROMETHEUS["scrape_configs"][0]["job_name"]
        assert f'up{{job="{job}"}} == 0' in expressions
    assert targets() == [f"{name}:{METRICS_PORT}" for name in ("sequencer", "relay-1", "relay-2")]
    # Grafana finds its source and its dashboards.
    provisioning = mounted["/etc/grafana/provisioning"]
    [source] = yaml.safe_load((provisioning / "datasources/prometheus.yml").read_text())[
        "datasources"
    ]
    assert source["url"] == "http://prometheus:9090"
    [provider] = yaml.safe_load((provisioning / "dashboards/datastreamer.yml").read_text())[
        "providers"
    ]
    dashboard = json.loads((mounted[provider["options"]["path"]] / "datastreamer.json").read_text())
    assert dashboard["uid"] == "datastreamer"
    assert dashboard["templating"]["list"][0]["query"] == source["type"]


def test_the_image() -> None:
    text = (DOCKER / "Containerfile").read_text()
    assert '"/source[metrics,archive]"' in text
    assert all(
        re.search(r":\d+\.\d+\.\d+-", base) for base in re.findall("^FROM (.*)", text, re.MULTILINE)
    )
    [command] = re.findall(r"^CMD (.*)", text, re.MULTILINE)
    assert str(METRICS_PORT) in json.loads(command)
    [user] = re.findall("^USER (.*)", text, re.MULTILINE)
    assert user == "6900:6900"
    [pod] = [each for each in KUBERNETES if each["kind"] == "StatefulSet"]
    context = pod["spec"]["template"]["spec"]["securityContext"]
    assert f"{context['runAsUser']}:{context['runAsGroup']}" == user


def test_the_kubernetes_example_hangs_together() -> None:
    kinds = {(each["kind"], each["metadata"]["name"]): each["spec"] for each in KUBERNETES}
    spec = kinds["StatefulSet", "datastreamer-relay"]
    assert ("Service", spec["serviceName"]) in kinds
    labels = spec["template"]["metadata"]["labels"]
    assert spec["selector"]["matchLabels"] == labels
    assert kinds["PodDisruptionBudget", "datastreamer-relay"]["selector"]["matchLabels"] == labels
    [container] = spec["template"]["spec"]["containers"]
    ports = {port["name"] for port in container["ports"]}
    for (kind, _), found in kinds.items():
        if kind == "Service":
            assert found["selector"] == labels
            assert {port["targetPort"] for port in found["ports"]} <= ports
    ensure_right(container["args"])


def ensure_right(words: list[str]) -> None:
    """The options of a `relay` are."""
    # (That of the log would hold for this process.)
    words = [word for word in words if word != "--log-format=json"]
    found = CliRunner().invoke(datastreamer, [*words, "--check-config"])
    assert (found.exit_code, found.stderr) == (0, "the options are right\n")


def test_the_compose_file_of_the_archive() -> None:
    services = WITH_S3["services"]
    assert not set(services) & set(SERVICES)
    for service in services.values():
        assert re.fullmatch(r"datastreamer|.*:RELEASE\..*Z", service["image"])
        assert set(service.get("depends_on", ())) <= {*services, *SERVICES}
        named = {volume.split(":")[0] for volume in service.get("volumes", ())}
        assert named <= set(WITH_S3["volumes"])
        if service["image"] == "datastreamer":
            ensure_right(service["command"])
            [url] = [word for word in service["command"] if word.startswith("s3://")]
            assert url.split("/")[2] == services["bucket"]["command"][-1].removeprefix("s3/")
            ensure_key(service["environment"], services["s3"]["environment"])
    key = services["archiver"]["environment"]
    host = f"http://{key['AWS_ACCESS_KEY_ID']}:{key['AWS_SECRET_ACCESS_KEY']}@s3:9000"
    assert services["bucket"]["environment"] == {"MC_HOST_s3": host}


def ensure_key(ours: dict[str, str], of_server: dict[str, str]) -> None:
    assert ours["AWS_ENDPOINT_URL"] == "http://s3:9000"
    assert ours["AWS_ACCESS_KEY_ID"] == of_server["MINIO_ROOT_USER"]
    assert ours["AWS_SECRET_ACCESS_KEY"] == of_server["MINIO_ROOT_PASSWORD"]


def test_the_kubernetes_example_of_the_archive() -> None:
    found = {(each["kind"], each["metadata"]["name"]): each for each in manifests("archive.yaml")}
    secret = found["Secret", "datastreamer-s3"]["stringData"]
    archiver = found["StatefulSet", "datastreamer-archiver"]["spec"]
    # An archive has one writer.
    assert archiver["replicas"] == 1
    labels = archiver["template"]["metadata"]["labels"]
    assert archiver["selector"]["matchLabels"] == labels
    assert found["Service", archiver["serviceName"]]["spec"]["selector"] == labels
    [container] = archiver["template"]["spec"]["containers"]
    ensure_right(container["args"])
    assert "--archive-mode=push" in container["args"]
    assert container["envFrom"] == [{"secretRef": {"name": "datastreamer-s3"}}]
    # The S3 server to try it with.
    tried = {each["kind"]: each["spec"] for each in manifests("s3.yaml")}
    [server] = tried["StatefulSet"]["template"]["spec"]["containers"]
    environment = {
        each["name"]: secret[each["valueFrom"]["secretKeyRef"]["key"]] for each in server["env"]
    }
    ensure_key(secret, environment)
    assert tried["Service"]["ports"][0]["port"] == server["ports"][0]["containerPort"] == 9000
    [job] = tried["Job"]["template"]["spec"]["containers"]
    assert f"--archive=s3://{job['args'][-1].removeprefix('s3/')}/mainnet" in container["args"]
    images = {each["image"] for each in WITH_S3["services"].values()}
    assert {server["image"], job["image"]} < images


def test_the_image_is_built_from_what_it_needs() -> None:
    root = CONTRIB.parent
    project = tomllib.loads((root / "pyproject.toml").read_text())
    lines = (DOCKER / "Containerfile.dockerignore").read_text().splitlines()
    rules = [line for line in lines if not line.startswith("#")]
    assert rules[0] == "*"
    taken = {rule[1:] for rule in rules if rule.startswith("!")}
    needed = {"datastreamer", "pyproject.toml", "setup.py", "MANIFEST.in", "LICENSE"}
    needed |= {project["project"]["readme"]}
    needed |= {f"{name}.py" for name in project["tool"]["setuptools"]["py-modules"]}
    assert taken == needed
    assert all((root / name).exists() for name in taken)


def test_the_commands_of_the_compose_file(tmp_path: Path) -> None:
    config = (DOCKER / "relay.toml").read_text()

    def here(words: list[str], **ports: int) -> list[str]:
        text = json.dumps(words)
        for folder in ("/data", "/etc"):
            text = text.replace(folder, str(tmp_path))
        for name, port in ports.items():
            text = re.sub(f"{name.replace('_', '-')}:[0-9]+", f"127.0.0.1:{port}", text)
        changed: list[str] = json.loads(text)
        return changed

    def relaying(words: list[str]) -> tuple[Running, int, int]:
        ports = ("--port", "0", "--metrics-port", "0")
        process = stack.enter_context(running(*words, *ports, cwd=tmp_path))
        found = process.err.until(r"metrics on http://0\.0\.0\.0:(\d+)/metrics")
        return process, process.port(), int(found[1])

    with ExitStack() as stack:
        command = SERVICES["sequencer"]["command"]
        own = {"6900", str(METRICS_PORT)}
        assert own < set(command)
        words = ["0" if word in own else word for word in here(command)]
        assert SERVICES["sequencer"]["entrypoint"] == ["dsapp"]
        serving = stack.enter_context(
            running(*words, module="datastreamer.cli.dsapp", cwd=tmp_path)
        )
        sequencer_metrics = int(serving.err.until(r"metrics on http://0\.0\.0\.0:(\d+)/metrics")[1])
        port = serving.port()
        words = here(SERVICES["relay-1"]["command"], sequencer=port)
        assert str(METRICS_PORT) in words
        one, first_port, first_metrics = relaying(words)
        assert taken(first_port) == list(range(20))
        assert f"metrics-port = {METRICS_PORT}\n" in config
        (text,) = here([config], sequencer=port, relay_1=first_port)
        (tmp_path / "relay.toml").write_text(text.replace("relay.bin", "second.bin"))
        two, second_port, second_metrics = relaying(here(SERVICES["relay-2"]["command"]))
        assert taken(second_port) == list(range(20))
        for metrics in (first_metrics, second_metrics):
            url = f"http://127.0.0.1:{metrics}/metrics"
            with urllib.request.urlopen(url, timeout=20) as answer:
                text = answer.read().decode()
            lag = f'datastreamer_relay_lag_entries{{upstream="127.0.0.1:{port}"}} '
            assert lag in text
        url = f"http://127.0.0.1:{sequencer_metrics}/metrics"
        with urllib.request.urlopen(url, timeout=20) as answer:
            assert "datastreamer_head_entries " in answer.read().decode()
        for process in (two, one):
            process.signal(signal.SIGTERM)
            assert process.wait() == 0
