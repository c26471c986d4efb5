import os
import subprocess
import sys


def test_without_a_network_the_client_is_offline_and_datasets_is_not_imported():
    code = (
        "import sys\n"
        "from stable_forgetting.common.base import hub\n"
        "hub.resolvable = lambda: False\n"
        "hub.prepare_client()\n"
        "from huggingface_hub import constants\n"
        "assert constants.HF_HUB_OFFLINE and 'datasets' not in sys.modules\n"
        "import datasets.config\n"
        "assert datasets.config.HF_HUB_OFFLINE\n"
        "constants.HF_HUB_OFFLINE = datasets.config.HF_HUB_OFFLINE = False\n"
        "hub.prepare_client()\n"
        "print(constants.HF_HUB_OFFLINE, datasets.config.HF_HUB_OFFLINE)\n"
    )
    unset = ("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE")
    env = {k: v for k, v in os.environ.items() if k not in unset}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=env)
    assert done.stdout.strip() == "True True", done.stderr
