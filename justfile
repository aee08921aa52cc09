# One command for all checks: `just check`.

default: check

# formatters and linters
lint:
    cargo fmt --all --check
    cargo clippy --workspace --all-targets -- -D warnings
    ruff format --check python tests benches docs
    ruff check python tests benches docs
    mypy
    python -m mypy.stubtest fastshard._core

# the core's tests, and the package's
test:
    cargo test --workspace
    python -m pytest

# the site, into site/
docs:
    mkdocs build --strict

# benchmarks at a small size
bench:
    python -m pytest benches --benchmark-only

check: lint test bench
