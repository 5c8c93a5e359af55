"""Boxes of elements."""

import numpy as np
import pytest

from ckpttool.model.region import Region


def elements(region, shape):
    numbers = np.arange(np.prod(shape, dtype=int)).reshape(shape)
    at = tuple(slice(a, b) for a, b in zip(region.start, region.stop, strict=True))
    return numbers[at].ravel().tolist()


@pytest.mark.parametrize(
    ("start", "stop", "match"),
    [
        ((0,), (1, 2), "1 starts and 2 stops"),
        ((), (1,), "0 starts and 1 stops"),
        ((2,), (1,), "no box"),
        ((-1,), (1,), "no box"),
        ((0, 3), (4, 2), "no box"),
    ],
)
def test_what_is_no_box_is_refused(start, stop, match):
    with pytest.raises(ValueError, match=match):
        Region(start, stop)


def test_the_whole_of_a_scalar_is_one_element_and_of_an_empty_tensor_none():
    assert Region.whole(()) == Region((), ())
    assert Region.whole(()).size == 1
    assert Region.whole((3, 0)).size == 0
    assert Region.whole((3, 4)).shape == (3, 4)


def test_moving_undoes_counting_from_an_origin():
    region = Region((3, 5), (7, 6))
    assert region.relative_to((3, 4)) == Region((0, 1), (4, 2))
    assert region.relative_to((3, 4)).moved_by((3, 4)) == region
    assert Region((), ()).relative_to(()) == Region((), ())


def test_an_origin_outside_the_region_or_of_other_axes_is_a_mistake():
    with pytest.raises(ValueError, match="no box"):
        Region((3, 5), (7, 6)).relative_to((4, 0))
    with pytest.raises(ValueError, match="an origin of 1 axes"):
        Region((3, 5), (7, 6)).relative_to((4,))
    with pytest.raises(ValueError, match="an offset of 3 axes"):
        Region((3, 5), (7, 6)).moved_by((4, 0, 0))


@pytest.mark.parametrize("shape", [(), (1,), (7,), (1, 1), (3, 5), (5, 1, 3), (2, 3, 1, 4)])
def test_bands_are_contiguous_in_order_and_as_large_as_allowed(shape):
    count = int(np.prod(shape, dtype=int))
    for limit in range(1, count + 2):
        bands = list(Region.whole(shape).bands(limit))
        numbers = [elements(band, shape) for band in bands]
        assert [n for part in numbers for n in part] == list(range(count))
        assert all(1 <= band.size <= limit for band in bands)
        if limit >= count:
            assert len(bands) == 1


def test_bands_of_a_band_are_contiguous_in_the_tensor():
    shape = (3, 4, 5)
    for band in Region.whole(shape).bands(7):
        inner = [n for part in band.bands(2) for n in elements(part, shape)]
        assert inner == elements(band, shape)
        assert inner == list(range(inner[0], inner[0] + len(inner)))


@pytest.mark.parametrize("shape", [(0,), (3, 0), (0, 3), (2, 0, 4)])
def test_an_empty_region_has_no_bands(shape):
    assert not list(Region.whole(shape).bands(10))


def test_bands_of_no_elements_are_a_mistake():
    with pytest.raises(ValueError, match="at most 0"):
        next(Region.whole((2,)).bands(0))
