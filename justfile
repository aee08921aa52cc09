# One command for all checks: `just check`.

default: check

# formatters and linters
lint:
    cargo fmt --all --check
    cargo clippy --workspace --all-targets -- -D warnings
    ruff format --check python tests benches docs examples
    ruff check python tests benches docs examples
    mypy
    cd tests && python -m mypy.stubtest --mypy-config-file ../.ci/stubtest.ini fastshard._core

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

# what decides whether a change lands; or some steps of it: just ci lint tests
ci *steps:
    bash .ci/run {{steps}}

# the same tests with the newest release of everything; what it finds blocks nobody
newest:
    FASTSHARD_NEWEST=1 bash .ci/run build install tests frameworks slow

# pins the newest versions, for review
pin:
    sh scripts/pin.sh && git diff --stat .ci/constraints.txt

check: lint test bench
