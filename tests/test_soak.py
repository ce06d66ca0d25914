"""SIGKILL at any moment, then --resume: the same bytes as a run that nobody touched, for all five.

By default few kills; `--soak 30` kills more often, at other moments each time.
"""

import random
import shutil
import time

import pytest
from conftest import outcome
from processes import SCRIPTS, finish, small_options, start

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("script", SCRIPTS)
def test_a_killed_run_ends_as_one_that_was_not(script, models_folder, files, tmp_path, request):
    kills = max(1, request.config.getoption("--soak") // len(SCRIPTS))
    moments = random.Random(f"{script} {request.config.getoption('--soak-seed')}")
    options = small_options(script, models_folder, files, tmp_path / "whole")
    clock = time.monotonic()
    finish(start(f"{script}.py", options, tmp_path / "whole.log"), tmp_path / "whole.log")
    seconds = time.monotonic() - clock

    log = tmp_path / "killed.log"
    options = [*small_options(script, models_folder, files, tmp_path / "killed"), "--resume"]
    killed = 0
    while killed < kills:
        process = start(f"{script}.py", options, log)
        process.join(moments.uniform(0.2, 0.9) * seconds)
        if process.exitcode is not None:  # it was faster than its moment: again, and earlier
            finish(process, log)
            shutil.rmtree(tmp_path / "killed")
            seconds *= 0.7
            continue
        process.kill()
        process.join()
        killed += 1
    finish(start(f"{script}.py", options, log), log)
    assert outcome(tmp_path / "killed") == outcome(tmp_path / "whole")
