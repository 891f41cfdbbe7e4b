# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-kvext project
"""The tool that reads command lines from tutorials keeps their flags, and no machine's names."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest

PAGE = """\
Text with `vllm serve x --flag` in a sentence.

    ```shell
    export TP=4
    export VLLM_ASCEND_NEW=1
    # A comment.
    vllm serve <MODEL_PATH> \\
      --port $2 \\
      --tensor-parallel-size $TP \\
      --data-parallel-size $3 \\
      --enable-prefix-caching \\
      --speculative-config '{"method": "eagle3", "model": "/x",
         "num_speculative_tokens": 3}' 2>&1 | tee log
    vllm serve other ...
    ```

```python
llm = LLM(model="/x/name", max_model_len=64, runner="pooling")
```
"""


def test_flags_and_variables_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(Path(__file__).parents[2] / "tools")
    reader = importlib.import_module("official_lines")
    command, call = reader.lines_of("models/X", PAGE)
    assert command.number == 7
    assert command.model == ""
    assert command.environ == {"VLLM_ASCEND_NEW": "1"}
    assert command.flags == {
        "tensor-parallel-size": "4",
        "data-parallel-size": None,
        "enable-prefix-caching": True,
        "speculative-config": {
            "method": "eagle3",
            "model": "draft",
            "num_speculative_tokens": 3,
        },
    }
    assert call.model == "name"
    assert call.flags == {"max-model-len": 64, "runner": "pooling"}
    (entry,) = reader.entries([command, command._replace(number=90)])
    assert entry["lines"] == [7, 90]
