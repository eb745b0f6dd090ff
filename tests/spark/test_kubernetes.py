"""The manifests for Kubernetes: what a server of its API gets, and that both say the same."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pyspark
import pytest
import yaml

from tests.spark.settings import ROOT

HOME = Path(pyspark.__file__).parent
FOLDER = ROOT / "contrib" / "kubernetes" / "spark"
APPLICATION: Any = yaml.safe_load((FOLDER / "application.yaml").read_text())
# The names of the operator's definition that the manifest may use, and their types.
NAMES: Any = {
    "type": str,
    "pythonVersion": str,
    "mode": str,
    "image": str,
    "sparkVersion": str,
    "mainApplicationFile": str,
    "arguments": [str],
    "deps": {"jars": [str]},
    "sparkConf": {"spark.pyspark.python": str},
    "restartPolicy": {
        "type": str,
        "onFailureRetryInterval": int,
        "onSubmissionFailureRetryInterval": int,
    },
    "volumes": [{"name": str, "persistentVolumeClaim": {"claimName": str}}],
    "driver": {
        "cores": int,
        "memory": str,
        "serviceAccount": str,
        "volumeMounts": [{"name": str, "mountPath": str}],
    },
    "executor": {
        "instances": int,
        "cores": int,
        "memory": str,
        "volumeMounts": [{"name": str, "mountPath": str}],
    },
}


def fits(found: Any, shape: Any) -> bool:
    if isinstance(shape, dict):
        return all(name in shape and fits(it, shape[name]) for name, it in found.items())
    if isinstance(shape, list):
        return isinstance(found, list) and all(fits(it, shape[0]) for it in found)
    return isinstance(found, shape)


class Api(BaseHTTPRequestHandler):
    """Accepts whatever is created."""

    created: list[Any]
    paths: str

    def do_POST(self) -> None:
        made = json.loads(self.rfile.read(int(self.headers["content-length"])))
        made["metadata"]["uid"] = f"uid-{len(self.created)}"
        self.created.append(made)
        Api.paths += self.path + "\n"
        self._answer(201, made)

    def do_PATCH(self) -> None:
        self.do_POST()

    def do_GET(self) -> None:
        self._answer(404, {"kind": "Status", "status": "Failure", "code": 404})

    def _answer(self, code: int, content: Any) -> None:
        body = json.dumps(content).encode()
        self.send_response(code)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: Any) -> None:
        pass


@pytest.mark.slow
def test_what_is_submitted(java: None, tmp_path: Path) -> None:
    Api.created, Api.paths = [], ""
    with ThreadingHTTPServer(("127.0.0.1", 0), Api) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        ran = subprocess.run(
            [FOLDER / "submit.sh", f"k8s://http://127.0.0.1:{server.server_port}"],
            env={
                **os.environ,
                "SPARK_HOME": str(HOME),
                "SPARK_SUBMIT": str(HOME / "bin" / "spark-submit"),
                "KUBECONFIG": str(tmp_path / "none"),
            },
            capture_output=True,
            text=True,
            timeout=280,
            check=False,
        )
        server.shutdown()
    assert ran.returncode == 0, ran.stderr[-3000:]
    (pod,) = (it for it in Api.created if it["kind"] == "Pod")
    (config,) = (it for it in Api.created if it["kind"] == "ConfigMap")
    spec = pod["spec"]
    (container,) = spec["containers"]
    wanted = APPLICATION["spec"]
    assert f"/namespaces/{APPLICATION['metadata']['namespace']}/pods" in Api.paths
    assert spec["serviceAccountName"] == wanted["driver"]["serviceAccount"]
    assert container["image"] == wanted["image"]
    words = container["args"]
    assert words[-3:] == [wanted["mainApplicationFile"], *wanted["arguments"]]
    for volume in wanted["volumes"]:
        assert any(
            it["name"] == volume["name"]
            and it["persistentVolumeClaim"]["claimName"]
            == volume["persistentVolumeClaim"]["claimName"]
            for it in spec["volumes"]
        )
    for mount in wanted["driver"]["volumeMounts"]:
        assert any(mount.items() <= it.items() for it in container["volumeMounts"])
    # As Spark's own properties, which driver and executors get.
    settings = config["data"]["spark.properties"].replace("\\:", ":")
    for line in (
        f"spark.jars={wanted['deps']['jars'][0]}",
        f"spark.executor.instances={wanted['executor']['instances']}",
        f"spark.executor.cores={wanted['executor']['cores']}",
        f"spark.executor.memory={wanted['executor']['memory']}",
        f"spark.driver.memory={wanted['driver']['memory']}",
        *(f"{name}={value}" for name, value in wanted["sparkConf"].items()),
    ):
        assert line in settings.splitlines(), line
    mount = "spark.kubernetes.executor.volumes.persistentVolumeClaim.tables.mount.path=/tables"
    assert mount in settings.splitlines()
    assert wanted["executor"]["volumeMounts"] == wanted["driver"]["volumeMounts"]


def test_the_application_and_the_image() -> None:
    assert APPLICATION["apiVersion"] == "sparkoperator.k8s.io/v1beta2"
    assert APPLICATION["kind"] == "SparkApplication"
    spec = APPLICATION["spec"]
    assert fits(spec, NAMES)
    image = (FOLDER / "Containerfile").read_text()
    assert f"apache/spark:{spec['sparkVersion']}-python3\n" in image
    # What the manifests name is where the image has it.
    main = Path(spec["mainApplicationFile"].removeprefix("local://"))
    assert f"COPY examples/{main.name} {main.parent}/" in image
    assert (ROOT / "examples" / main.name).is_file()
    (jar,) = spec["deps"]["jars"]
    assert f"/spark/native/{Path(jar).name}" in image
    assert shlex.split((FOLDER / "submit.sh").read_text(), comments=True)[-1] == "/tables"
