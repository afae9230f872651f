"""Maps of patch tokens beside the images they are of."""

from collections.abc import Callable

import numpy as np
from safetensors.numpy import load_file, save_file

from pmae.report.contents import load
from pmae.report.pictures import enlarged, lit
from pmae.report.samples import token_figure
from pmae.runs import Run


def test_a_cell_becomes_a_block_of_pixels() -> None:
    cells = np.random.default_rng(0).random((2, 2, 3, 3))
    np.testing.assert_array_equal(enlarged(cells, (4, 12)), np.kron(cells, np.ones((1, 2, 4, 1))))
    assert enlarged(cells, (5, 7)).shape == (2, 5, 7, 3)


def test_the_figure_lights_what_cls_looks_at(make_run: Callable[..., Run]) -> None:
    run = make_run()
    tensors = load_file(run.path / "samples.safetensors")
    looked = np.zeros((8, 2, 2), np.float32)
    looked[:, 0, 1] = 0.9
    maps = {"token_colours": np.random.default_rng(0).random((8, 2, 2, 3)).astype(np.float32)}
    for more, columns in ((maps, 2), (maps | {"attention": looked}, 3)):
        save_file(tensors | more, run.path / "samples.safetensors")
        drawing = token_figure(load(run.path))
        assert len(drawing.figure.axes[0].texts) == columns
        assert ("[CLS]" in drawing.caption) == (columns == 3)
    bright = lit(np.ones((8, 8, 8, 3)), looked)
    assert (bright[:, :4, 4:] == 1).all()
    np.testing.assert_allclose(bright[:, 4:], 0.15)
