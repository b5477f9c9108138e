"""Three ways to test kernels without a GPU.

They are kept apart because the import of a kernel decides whether Triton interprets it.

- The tests in interpreted/ run the kernels on CPU tensors through Triton's interpreter. They are
  collected only where TRITON_INTERPRET=1, with the interpreter repaired before their import;
  test_interpreted.py runs them in a process of their own. To run a file by hand:
  `TRITON_INTERPRET=1 pytest tests/kernels/interpreted/cache/test_cache_write.py`.
- kernels/dry_run.py compiles what the wrappers would launch, for any GPU, and launches nothing:
  `with dry_run.target(90) as launches: wrapper(cpu tensors)`; compiled/static_check.py reads the
  result.
- All other tests run on the CPU: those in cpu/ run the C++ kernels, the rest plain torch.
"""

from __future__ import annotations

import os

# NOTE: with the variable set, @triton.jit makes interpreted functions, which compile to nothing.
if os.environ.get("TRITON_INTERPRET") == "1":
    collect_ignore_glob = ["test_*.py", "compiled/test_*.py", "host/test_*.py"]
else:
    collect_ignore_glob = ["interpreted/*test_*.py"]
