"""What every room uses: errors, dtypes, options, small files read safely."""
