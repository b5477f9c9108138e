"""Arrays that are sent to the device in one copy."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from engine.staging import Staging, Upload


def test_a_slot_has_its_tensor_once_the_upload_is_sent():
    upload = Upload(Staging(torch.device("cpu")))
    ids, weights = upload.put(np.arange(5)), upload.put(np.ones((2, 1), np.float32))
    with pytest.raises(RuntimeError, match="not been sent"):
        _ = ids.tensor
    upload.send()
    assert ids.tensor.tolist() == [0, 1, 2, 3, 4]
    assert torch.equal(weights.tensor, torch.ones(2, 1))
