import signal
from pathlib import Path

import pytest

import kvrelay.__main__
from tests.cli.conftest import FakeLifecycle, Run


def write_config(folder: Path, text: str = "name: mine\n") -> None:
    (folder / "serving.yaml").write_text(text)


def test_up_reports_progress_and_prints_the_address(run: Run, folder: Path, lifecycle: FakeLifecycle) -> None:
    write_config(folder)
    result = run("up")
    assert result.exit_code == 0
    assert result.stdout == "ready at 127.0.0.1:1 · OpenAI-compatible: http://127.0.0.1:2/v1\n"
    assert "prefill-0: loading" in result.stderr
    assert "Live page: http://127.0.0.1:2/" in result.stderr
    (call,) = lifecycle.ups
    assert call.config.name == "mine"
    assert call.config_path == Path("serving.yaml")
    assert call.run_dir == lifecycle.default_run_dir("mine")
    assert lifecycle.downs == []


def test_up_with_another_launcher_overrides_the_file(run: Run, folder: Path, lifecycle: FakeLifecycle) -> None:
    write_config(folder, "name: mine\nlauncher: ray\nrouter: {port: 0}\n")
    assert run("up", "--launcher", "local").exit_code == 0
    (call,) = lifecycle.ups
    assert call.config.launcher == "local"
    assert call.config.router.port == 0


def test_up_without_a_configuration_names_the_file(run: Run, lifecycle: FakeLifecycle) -> None:
    result = run("up")
    assert result.exit_code == 1
    assert result.stderr.startswith("kvrelay: serving.yaml: cannot be read")
    assert "`launcher: local` in it serves the default model" in result.stderr
    assert lifecycle.ups == []


def test_up_with_a_bad_configuration_names_file_and_key(run: Run, folder: Path) -> None:
    write_config(folder, "pools: {decode: {block_size: 32}}\nmodle: {}\n")
    result = run("up")
    assert result.exit_code == 1
    assert "serving.yaml:modle: unknown key; did you mean model?" in result.stderr


def test_up_that_fails_tells_the_reason(run: Run, folder: Path, lifecycle: FakeLifecycle) -> None:
    write_config(folder)
    lifecycle.up_error = lifecycle.ClusterError("decode-0 ended with code 1")
    result = run("up")
    assert result.exit_code == 1
    assert "kvrelay: decode-0 ended with code 1" in result.stderr


def test_up_in_the_foreground_stops_the_cluster_when_its_supervisor_has_ended(
    run: Run, folder: Path, lifecycle: FakeLifecycle
) -> None:
    write_config(folder)
    before = signal.getsignal(signal.SIGTERM)
    result = run("up", "--foreground")
    assert result.exit_code == 0
    assert lifecycle.downs == [lifecycle.default_run_dir("mine")]
    assert signal.getsignal(signal.SIGTERM) is before


def test_up_in_the_foreground_that_fails_leaves_a_running_cluster_alone(
    run: Run, folder: Path, lifecycle: FakeLifecycle
) -> None:
    write_config(folder)
    run("up")
    lifecycle.up_error = lifecycle.ClusterError("a cluster already runs")
    result = run("up", "--foreground")
    assert result.exit_code == 1
    assert "a cluster already runs" in result.stderr
    assert lifecycle.downs == []


def test_down_stops_the_cluster_of_the_file(run: Run, folder: Path, lifecycle: FakeLifecycle) -> None:
    write_config(folder)
    run("up")
    result = run("down")
    assert result.exit_code == 0
    assert "stopped" in result.stderr
    assert not lifecycle.running


def test_down_without_a_cluster_says_so(run: Run, lifecycle: FakeLifecycle) -> None:
    result = run("down")
    assert result.exit_code == 0
    assert "no cluster is running" in result.stderr
    assert "If that folder was deleted, a cluster in Ray goes on" in result.stderr
    assert lifecycle.downs == [lifecycle.default_run_dir("kvrelay")]


def test_down_while_only_other_clusters_run_fails_and_names_them(
    run: Run, folder: Path, lifecycle: FakeLifecycle
) -> None:
    (folder / "other.yaml").write_text("name: other\n")
    run("up", "--config", "other.yaml")
    result = run("down")
    assert result.exit_code == 1
    assert "no cluster is running for serving.yaml; running here: other (name its file with --config)" in result.stderr
    assert lifecycle.running


@pytest.mark.parametrize("edited", ["name: mine\nmodle: {}\n", "name: 'mine'  # ours\npools: {decode: [\n"])
def test_down_stops_a_cluster_whose_file_was_edited_and_is_now_wrong(
    run: Run, folder: Path, lifecycle: FakeLifecycle, edited: str
) -> None:
    write_config(folder)
    run("up")
    write_config(folder, edited)
    assert run("down").exit_code == 0
    assert not lifecycle.running


def test_interrupt_while_modules_load_prints_no_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted() -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("cli.main.main", interrupted)
    monkeypatch.setattr("kvrelay.__main__.check_packages", lambda _path: None)
    with pytest.raises(SystemExit) as end:
        kvrelay.__main__.main()
    assert end.value.code == 130


AUTH = f"router: {{auth: api_key}}\ntenants: [{{name: a, api_key_sha256: [{'a' * 64}]}}]\n"


@pytest.mark.parametrize(("router", "key"), [("", ""), (AUTH, "KVRELAY_API_KEY=… ")])
def test_next_commands_of_up_find_this_cluster_and_leave_room_for_a_key(
    run: Run, folder: Path, router: str, key: str
) -> None:
    (folder / "my x.yaml").write_text(f"name: mine\n{router}")
    result = run("up", "--config", "my x.yaml")
    assert f"Next: {key}kvrelay generate -c 'my x.yaml' -p" in result.stderr
    assert "kvrelay down -c 'my x.yaml'" in result.stderr
