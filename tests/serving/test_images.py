"""An image file through a served detector, over HTTP and through the page's form in Chromium."""

from __future__ import annotations

import contextlib
import io
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("PIL", reason="pillow is not installed")

import trt_engine as te
from patience import until
from serving.test_page import CHROMIUM, FLAGS
from serving.triton import fetch
from trt_engine.verbs.serve.server import Server
from trt_engine.vision.image_inference import ImageRunner

DIGITS = Path(__file__).resolve().parents[2] / "examples" / "digits"
IMAGE = DIGITS / "val" / "images" / "val_0_0000.jpg"


def truth() -> list[tuple[str, list[float]]]:
    """Name and box (left, top, right, bottom) of each object in the image."""
    found = json.loads((DIGITS / "val" / "annotations.json").read_text())
    (number,) = [image["id"] for image in found["images"] if Path(image["file_name"]).name == IMAGE.name]
    names = {category["id"]: category["name"] for category in found["categories"]}
    boxes = [item for item in found["annotations"] if item["image_id"] == number]
    return sorted(
        (names[item["category_id"]], [x, y, x + width, y + height])
        for item in boxes
        for x, y, width, height in [item["bbox"]]
    )


@pytest.fixture(scope="module")
def server(engines: dict[str, Path], serve: Callable[..., Server], tmp_path_factory: pytest.TempPathFactory) -> Server:
    folder = tmp_path_factory.mktemp("digits")
    engine = te.build(DIGITS / "model.onnx", out=folder / "digits.engine.onnx", parity=False)
    return serve(engine, engines["double"], grpc_port=-1)


def test_objects_are_found_where_the_annotations_have_them(server: Server) -> None:
    assert fetch(server, "/v2/models/digits")[2]["properties"]["image"] == "detect"
    for path in ("/v2/models/digits/image", "/v2/models/digits/versions/1/image"):
        status, headers, found = fetch(server, path, IMAGE.read_bytes())
        assert status == 200 and "backend=onnxruntime" in headers["trt-engine"]
        sure = [one for one in found["detections"] if one["score"] >= 0.5]
        assert sorted({one["name"] for one in sure}) == [name for name, _ in truth()]
        for name, expected in truth():
            assert [one for one in sure if one["name"] == name and one["box"] == pytest.approx(expected, abs=8)]
    (stats,) = fetch(server, "/v2/models/digits/stats")[2]["model_stats"]
    assert stats["inference_stats"]["success"]["count"] == 2


def test_a_picture_is_admitted_by_its_pixels_before_it_is_decoded(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    from PIL import Image

    raw = io.BytesIO()
    Image.new("1", (6000, 4000)).save(raw, "PNG")
    assert len(raw.getvalue()) < 10_000 and server._service is not None
    admission = server._service.admission
    counted: list[int] = []
    parse = ImageRunner.parse
    monkeypatch.setattr(ImageRunner, "parse", lambda *given: counted.append(admission.nbytes) or parse(*given))
    assert fetch(server, "/v2/models/digits/image", raw.getvalue())[0] == 200
    assert counted[0] >= 6000 * 4000 * 15 and admission.nbytes == 0
    monkeypatch.setattr(admission, "max_bytes", 6000 * 4000)
    status, _, answer = fetch(server, "/v2/models/digits/image", raw.getvalue())
    assert status == 400 and "takes 360000000 bytes decoded, 24000000 are allowed" in answer["error"]
    monkeypatch.setattr(admission, "max_bytes", 6000 * 4000 * 15)
    assert fetch(server, "/v2/models/digits/image", raw.getvalue())[0] == 200, "the only request"
    admission.enter()
    assert fetch(server, "/v2/models/digits/image", raw.getvalue())[0] == 503
    admission.leave()
    assert len(counted) == 2, "what is refused is not decoded"


LAUNCH = (
    "import fcntl, os, sys; ends = [fcntl.fcntl(int(end), fcntl.F_DUPFD, 10) for end in sys.argv[1:3]]; "
    "os.dup2(ends[0], 3); os.dup2(ends[1], 4); os.execv(sys.argv[3], sys.argv[3:])"
)
"""A program that starts another one with two pipes as 3 and 4, where Chromium expects them."""
CANVAS = "document.querySelector('canvas:not([hidden])')"


class Browser:
    """Chromium through its own protocol on two pipes."""

    def __init__(self, send: int, receive: int) -> None:
        self._send, self._receive = send, receive
        self._number, self._session, self._rest = 0, None, b""

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        self._number += 1
        message: dict[str, Any] = {"id": self._number, "method": method, "params": parameters}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._send, json.dumps(message).encode() + b"\0")
        while True:
            while b"\0" not in self._rest:
                chunk = os.read(self._receive, 1 << 16)
                assert chunk, "the browser has ended"
                self._rest += chunk
            raw, _, self._rest = self._rest.partition(b"\0")
            answer = json.loads(raw)
            if answer.get("id") == self._number:
                assert "error" not in answer, answer
                return dict(answer["result"])

    def open(self, url: str) -> None:
        target = self.call("Target.createTarget", url=url)["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]

    def wait_for(self, expression: str) -> Any:
        """The value of a JavaScript expression, once it is not null."""
        found: list[Any] = []

        def look() -> bool:
            with contextlib.suppress(AssertionError):  # the page is still being opened
                found.append(
                    self.call("Runtime.evaluate", expression=expression, returnByValue=True)["result"].get("value")
                )
            return bool(found) and found[-1] is not None

        until(look, expression)
        return found[-1]

    def choose_file(self, selector: str, path: Path) -> None:
        document = self.call("DOM.getDocument")["root"]["nodeId"]
        node = self.call("DOM.querySelector", nodeId=document, selector=selector)["nodeId"]
        self.call("DOM.setFileInputFiles", nodeId=node, files=[str(path)])


@pytest.fixture
def browser(tmp_path: Path) -> Iterator[Browser]:
    with contextlib.ExitStack() as stack:
        pipes = [*os.pipe(), *os.pipe()]
        for end in pipes:
            stack.callback(os.close, end)
        their_input, our_output, our_input, their_output = pipes
        options = [*FLAGS, "--remote-debugging-pipe", f"--user-data-dir={tmp_path}", "about:blank"]
        process = subprocess.Popen(
            [sys.executable, "-c", LAUNCH, str(their_input), str(their_output), str(CHROMIUM), *options],
            pass_fds=(their_input, their_output), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        )  # fmt: skip
        try:
            yield Browser(our_output, our_input)
        finally:
            process.terminate()
            process.wait()


@pytest.mark.browser
@pytest.mark.slow
@pytest.mark.skipif(CHROMIUM is None, reason="Chromium is not installed")
def test_the_form_of_the_page_draws_the_boxes(server: Server, browser: Browser, tmp_path: Path) -> None:
    browser.open(f"http://{server.http_address}/")
    assert browser.wait_for("document.querySelector('input[type=file]') && 1") == 1
    assert browser.wait_for("document.querySelectorAll('input[type=file]').length") == 1, "one model takes images"
    browser.choose_file("input[type=file]", IMAGE)
    text = browser.wait_for(f"{CANVAS} && document.querySelector('.found').textContent")
    assert {part.split()[0] for part in text.split(", ")} >= {name for name, _ in truth()}
    left, top, _, bottom = truth()[0][1]
    pixels = f"{CANVAS}.getContext('2d').getImageData({left - 8}, {(top + bottom) / 2}, 16, 1).data"
    row = np.array(browser.wait_for(f"Array.from({pixels})")).reshape(-1, 4)[:, :3]
    assert np.ptp(row, axis=1).max() > 80, "a coloured line at the left edge of the box"
    (tmp_path / "broken.jpg").write_bytes(b"no image")
    browser.choose_file("input[type=file]", tmp_path / "broken.jpg")
    assert "not a readable image" in browser.wait_for(
        "/not a/.exec(document.querySelector('.found').textContent)?.input"
    )
