"""The page at `/`: no external asset, and in Chromium the models with their state, facts and calls."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from patience import HANG_S
from serving.conftest import place
from trt_engine.verbs.serve.server import Server

CHROMIUM = os.environ.get("CHROMIUM") or next(
    filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None
)
FLAGS = ("--headless", "--no-sandbox", "--disable-gpu", "--disable-background-networking", "--disable-dev-shm-usage")


@pytest.fixture(scope="module")
def server(engines: dict[str, Path], serve: Callable[..., Server], tmp_path_factory: pytest.TempPathFactory) -> Server:
    root = tmp_path_factory.mktemp("models")
    place(engines["double"], root, "good")
    place(engines["double"], root, "broken", config="ensemble_scheduling {}")
    return serve(model_repository=root, grpc_port=-1)


@pytest.mark.browser
@pytest.mark.slow
@pytest.mark.skipif(CHROMIUM is None, reason="Chromium is not installed")
def test_in_a_browser_it_shows_models_with_their_state_and_calls(server: Server, tmp_path: Path) -> None:
    command = [str(CHROMIUM), *FLAGS, f"--user-data-dir={tmp_path}", "--virtual-time-budget=4000", "--dump-dom"]
    done = subprocess.run([*command, f"http://{server.http_address}/"], capture_output=True, text=True, timeout=HANG_S)
    page = done.stdout
    assert "good, version 1" in page and '<p class="state good">ready</p>' in page
    assert "not ready: `config.pbtxt` of `broken`" in page and "sha256:" in page
    assert f"curl http://{server.http_address}/v2/models/good/infer" in page
    assert 'calls.infer("good", inputs)' in page and "requests per second: 0.0" in page


@pytest.mark.browser
@pytest.mark.slow
@pytest.mark.skipif(CHROMIUM is None, reason="Chromium is not installed")
@pytest.mark.parametrize(("width", "dark"), [(1280, False), (1280, True), (500, False), (500, True)])
def test_it_is_light_or_dark_and_has_a_margin_at_each_width(
    server: Server, tmp_path: Path, width: int, dark: bool
) -> None:
    image = pytest.importorskip("PIL.Image", reason="Pillow is not installed")
    theme = ["--blink-settings=preferredColorScheme=0"] if dark else []
    size, picture = f"--window-size={width},900", tmp_path / "page.png"
    command = [str(CHROMIUM), *FLAGS, *theme, f"--user-data-dir={tmp_path}", "--hide-scrollbars", size]
    command += ["--virtual-time-budget=4000", f"--screenshot={picture}", f"http://{server.http_address}/"]
    subprocess.run(command, check=True, capture_output=True, timeout=HANG_S)
    page = image.open(picture).convert("L")
    ground = page.getpixel((2, 2))
    assert (ground < 60) is dark and (ground > 200) is not dark
    right = page.crop((width - 8, 0, width, 900)).getextrema()
    assert right == (ground, ground), "nothing reaches the right edge, where it would be cut off"
