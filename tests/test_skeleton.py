import subprocess
import sys

import torch

from whisfusion.decoder import DecoderConfig, DiffusionDecoder
from whisfusion.skeleton import skeleton

SMALL = DecoderConfig(layers=1, width=32, heads=1, hidden=64, audio_width=32, block="whisper", adapter=1, reach=3)


def test_a_skeleton_has_the_shapes_of_the_module_and_no_weights():
    with skeleton():
        bones = DiffusionDecoder(SMALL)
    whole = DiffusionDecoder(SMALL)
    assert {name: x.shape for name, x in bones.state_dict().items()} == {
        name: x.shape for name, x in whole.state_dict().items()
    }
    assert all(x.is_meta for x in bones.state_dict().values())


def test_what_is_made_afterwards_has_weights_again():
    with skeleton():
        pass
    assert torch.nn.Linear(8, 8).weight.detach().std() > 0


def test_no_compiler_is_loaded_for_it():
    code = (
        "import sys\n"
        "from whisfusion.decoder import DecoderConfig, DiffusionDecoder\n"
        "from whisfusion.skeleton import skeleton\n"
        "with skeleton(): DiffusionDecoder(DecoderConfig(layers=1))\n"
        "print('torch._inductor' in sys.modules, 'sympy' in sys.modules)\n"
    )
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert said.split() == ["False", "False"]
