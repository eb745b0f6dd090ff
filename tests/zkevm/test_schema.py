"""The tables, the .proto and the generated classes say the same."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from datastreamer.zkevm import events
from datastreamer.zkevm.schema import BOOL, BYTES, DEBUG, ENUM, FULL_U64, MESSAGES, U32, U64, WEI

ROOT = Path(__file__).resolve().parent.parent.parent
PROTO = "datastreamer/zkevm/proto/datastream.proto"
KINDS = {
    U64: "uint64",
    FULL_U64: "uint64",
    U32: "uint32",
    BOOL: "bool",
    BYTES: "bytes",
    WEI: "bytes",
    DEBUG: "Debug",
}


def test_the_proto_has_the_fields_of_the_tables() -> None:
    text = (ROOT / PROTO).read_text()
    assert 'syntax = "proto3";' in text
    assert "package datastream.v1;" in text
    for message in MESSAGES.values():
        (body,) = re.findall(rf"message {message.name} {{\n(.*?)}}", text, re.DOTALL)
        enum = "BookmarkType" if message.name == "BookMark" else "BatchType"
        lines = [
            f"  {enum if field.kind == ENUM else KINDS[field.kind]} {field.name} = {field.number};"
            for field in message.fields
        ]
        assert body.splitlines() == lines
    (debug,) = re.findall(r"message Debug {\n(.*?)}", text, re.DOTALL)
    assert debug == "  string message = 1;\n"


@pytest.mark.parametrize(
    "name, prefix", [("BookmarkType", "BOOKMARK_TYPE"), ("BatchType", "BATCH_TYPE")]
)
def test_the_proto_has_the_enumerations(name: str, prefix: str) -> None:
    (body,) = re.findall(rf"enum {name} {{\n(.*?)}}", (ROOT / PROTO).read_text(), re.DOTALL)
    members = [f"  {prefix}_{member.name} = {member.value};" for member in getattr(events, name)]
    assert body.splitlines() == members


def test_the_generated_classes_are_those_of_the_proto(tmp_path: Path) -> None:
    pytest.importorskip("grpc_tools", reason="grpcio-tools is not installed")
    words = ["-m", "grpc_tools.protoc", "-I.", f"--python_out={tmp_path}", PROTO]
    subprocess.run([sys.executable, *words], check=True, cwd=ROOT, timeout=60)
    made = PROTO.replace(".proto", "_pb2.py")

    def descriptor(path: Path) -> str:
        # What follows it, and the versions before it, are the compiler's own.
        (line,) = re.findall(r"AddSerializedFile\((b'.*')\)", path.read_text())
        return str(line)

    assert descriptor(ROOT / made) == descriptor(tmp_path / made)
