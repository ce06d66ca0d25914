"""demo/browser/index.html in a real Chromium: the similarities are those of torch."""

import functools
import http.server
import queue
import shutil
import subprocess
import threading

import numpy as np
import pytest
from conftest import ROOT

import common
from eval_sts import embed
from extras import quantize

PAGE = ROOT / "demo" / "browser"
CHROMIUM = shutil.which("chromium")
REPORT = """<script type="module">
  const report = () => fetch("/report", { method: "POST", body: document.body.innerText });
  new MutationObserver(report).observe(document.getElementById("status"), { childList: true });
</script>"""
FLAGS = ("--headless", "--no-sandbox", "--disable-gpu", "--remote-debugging-port=0")


class Server(http.server.SimpleHTTPRequestHandler):
    """Serves a folder, and the page with a script that reports what it shows."""

    def do_GET(self):
        if not self.path.startswith("/demo/browser/?"):
            return super().do_GET()
        self.send_response(200)
        self.send_header("Content-Type", "text/html")
        self.end_headers()
        self.wfile.write((PAGE / "index.html").read_bytes() + REPORT.encode())

    def do_POST(self):
        self.server.reports.put(self.rfile.read(int(self.headers["Content-Length"])).decode())
        self.send_response(204)
        self.end_headers()

    def log_message(self, *_):
        pass


@pytest.mark.slow
@pytest.mark.parametrize("bits, dtype, tolerance", [(4, "q4", 0.06), (8, "int8", 0.02)])
def test_the_nearest_sentences(bits, dtype, tolerance, call_main, tmp_path):
    if not CHROMIUM:
        pytest.skip("Chromium is not installed")
    if not (PAGE / "node_modules").exists():
        pytest.skip("transformers.js is not installed (docs/engineering.md, In a browser)")
    encoder = common.load_encoder(common.MINILM, layers="0,5")
    common.save_encoder(encoder, tmp_path / "student")
    call_main(quantize, tmp_path / "student", "--bits", bits)
    (tmp_path / "demo").symlink_to(ROOT / "demo")
    handler = functools.partial(Server, directory=tmp_path)
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        server.reports = queue.Queue()
        threading.Thread(target=server.serve_forever, daemon=True).start()
        address = f"http://127.0.0.1:{server.server_port}/demo/browser/?model=student&dtype={dtype}"
        options = [*FLAGS, f"--user-data-dir={tmp_path / 'profile'}", address]
        browser = subprocess.Popen([CHROMIUM, *options], stderr=subprocess.DEVNULL)
        try:
            shown = server.reports.get(timeout=120)
        finally:
            browser.kill()
            browser.wait()
            server.shutdown()
    rows = [line.split("\t") for line in shown.splitlines() if "\t" in line]
    assert len(rows) == 5 and f"student, {dtype}" in shown, shown
    query, *vectors = common.encode(
        embed, encoder, ["A man plays the guitar.", *(text for _, text in rows)]
    )
    similarities = [float(cosine) for cosine, _ in rows]
    assert similarities == sorted(similarities, reverse=True)
    assert np.allclose(similarities, np.array(vectors) @ query, atol=tolerance)
    assert rows[0][1] == "A guy is strumming a guitar."
