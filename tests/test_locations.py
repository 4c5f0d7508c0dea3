"""Protects how URIs become file systems and stores: settings, credentials, and errors where a driver is missing."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from hotbed.checkpoint import directory
from hotbed.cli.main import main
from hotbed.config import MemoryRecipe
from hotbed.data.formats.parquet import find_parquet
from hotbed.errors import CheckpointError, DataError, RecipeError
from hotbed.locations import _S3, local, location, object_store, resolve_uri


def test_locations() -> None:
    assert location("s3://bucket/a//b") == "s3://bucket/a//b"
    assert location("file:///a%20b") == local("x", "file:///a%20b") == Path("/a b")
    assert location("a/b") == Path("a/b")
    assert location("~/a") == Path.home() / "a"
    with pytest.raises(RecipeError, match=r"--out: got s3://b, expected a local path"):
        local("--out", "s3://b")
    with pytest.raises(RecipeError, match=r"memory.directory: got s3://b/x, expected a local path"):
        MemoryRecipe(tier="disk", directory="s3://b/x")


def test_settings_of_s3_are_the_same_for_both_libraries(s3: str, monkeypatch: pytest.MonkeyPatch) -> None:
    directory(s3.replace("PATH", "settings")).write("a.json", "{}")
    host = s3.partition("endpoint_override=")[2].partition("&")[0]
    in_uri = f"?endpoint_override={host}&scheme=http"
    whole = f"?endpoint_override=http%3A%2F%2F{host}&region=eu-west-1"
    for query, environment in (
        (in_uri, {}),
        (whole, {}),
        ("", {"AWS_ENDPOINT_URL": f"http://{host}"}),
        ("", {"AWS_ENDPOINT_URL_S3": f"http://{host}", "AWS_ENDPOINT_URL": "http://127.0.0.1:9"}),
        (in_uri, {"AWS_ENDPOINT_URL": "http://127.0.0.1:9"}),
    ):
        with monkeypatch.context() as patch:
            for name, value in environment.items():
                patch.setenv(name, value)
            uri = f"s3://models/settings{query}"
            assert directory(uri).names() == ["a.json"]
            filesystem, path = resolve_uri(uri)
            assert path == "models/settings"
            assert filesystem.get_file_info(f"{path}/a.json").size == 2


def test_the_region_is_that_of_the_uri_the_environment_or_the_bucket(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("AWS_REGION", "AWS_DEFAULT_REGION", "AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("pyarrow.fs.resolve_s3_region", lambda bucket: f"region of {bucket}")
    assert _S3.of("s3://models/x").config() == {"region": "region of models"}
    assert _S3.of("s3://models/x?endpoint_override=h:1").config() == {"region": "us-east-1", "endpoint": "https://h:1"}
    monkeypatch.setenv("AWS_DEFAULT_REGION", "eu-west-1")
    assert _S3.of("s3://models/x").config() == {"region": "eu-west-1"}
    monkeypatch.setenv("AWS_REGION", "eu-west-2")
    assert _S3.of("s3://models/x").config() == {"region": "eu-west-2"}
    assert _S3.of("s3://models/x?region=eu-west-3").config() == {"region": "eu-west-3"}

    def unknown(_: str) -> str:
        raise OSError("no such host")

    monkeypatch.setattr("pyarrow.fs.resolve_s3_region", unknown)
    monkeypatch.delenv("AWS_REGION")
    monkeypatch.delenv("AWS_DEFAULT_REGION")
    for do in (lambda: directory("s3://models/x"), lambda: find_parquet("s3://models/x")):
        with pytest.raises(
            (CheckpointError, DataError), match=r"region of bucket models is not known .* Set AWS_REGION"
        ):
            do()


def test_keys_of_a_profile_are_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "credentials"
    file.write_text("[default]\naws_access_key_id = k\naws_secret_access_key = s\n")
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(file))
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "of the environment")
    place = _S3.of("s3://models/x?region=eu-west-1")
    assert place.credentials() is None  # obstore takes the environment's
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY", raising=False)
    provider = place.credentials()
    assert provider is not None
    assert provider()["access_key_id"] == "k"  # type: ignore[index]
    monkeypatch.setenv("AWS_PROFILE", "absent")
    with pytest.raises(CheckpointError, match=r"s3://models/x.* cannot be opened: .*absent"):
        directory("s3://models/x?region=eu-west-1")
    monkeypatch.delenv("AWS_PROFILE")
    monkeypatch.setitem(sys.modules, "boto3", None)
    with pytest.raises(CheckpointError, match=r"profiles of ~/.aws need boto3. pip install 'hotbed\[remote\]'"):
        directory("s3://models/x?region=eu-west-1")


def test_drivers_that_are_missing(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    with monkeypatch.context() as patch:
        for name in ("obstore", "obstore.exceptions", "obstore.store"):
            patch.setitem(sys.modules, name, None)
        for uri in ("s3://models/x?region=eu-west-1", "gs://models/x", "abfss://models@mine.dfs.core.windows.net/x"):
            with pytest.raises(CheckpointError, match=r"need obstore. pip install 'hotbed\[remote\]'"):
                directory(uri)
        resolve_uri("s3://models/x?region=eu-west-1")  # Parquet is read without

    with pytest.raises(DataError, match=r"sftp://host/x cannot be opened: .*paramiko"):
        find_parquet("sftp://host/x")
    with pytest.raises(DataError, match=r"nonsense://x cannot be opened"):
        find_parquet("nonsense://x")
    if _java():
        pytest.skip("HDFS has its driver here")
    with pytest.raises(DataError, match=r"hdfs://name:8020/x cannot be opened: .* load lib.* JAVA_HOME") as raised:
        find_parquet("hdfs://name:8020/x")
    assert "\n" not in str(raised.value)
    for argv in (["init", "hdfs://name/x"], ["inspect", "hdfs://name/x"], ["inspect", "hdfs://name/x", "--skew"]):
        assert main(argv) == 2
        message = capsys.readouterr().err
        assert "HDFS needs Java and Hadoop's" in message
        assert "Traceback" not in message


@pytest.mark.parametrize("scheme", ["hdfs", "sftp", "nonsense"])
def test_checkpoints_are_kept_on_disks_and_in_object_stores(scheme: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(
        CheckpointError, match=rf"{scheme}://name/x cannot be opened: hotbed writes checkpoints .*object stores"
    ):
        directory(f"{scheme}://name/x")
    assert main(["eval", "--checkpoint", f"{scheme}://name/x"]) == 2
    assert f"{scheme}://name/x cannot be opened: hotbed writes checkpoints" in capsys.readouterr().err


def _java() -> bool:
    from pyarrow import fs

    try:
        fs.FileSystem.from_uri("hdfs://name:8020/x")
    except OSError as error:
        return "load lib" not in str(error)
    return True


def test_stores_that_have_no_server_to_test_against_can_be_named(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {
        "GOOGLE_SKIP_SIGNATURE": "true",
        "AZURE_SKIP_SIGNATURE": "true",
    }.items():
        monkeypatch.setenv(name, value)
    assert object_store("gs://models/a/b")[1] == "a/b"
    assert object_store("abfss://models@mine.dfs.core.windows.net/a%20b/")[1] == "a b"
    for uri in ("gs://models/a/b", "abfss://models@mine.dfs.core.windows.net/a/b"):
        assert resolve_uri(uri)[1] == "models/a/b"
