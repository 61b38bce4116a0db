"""`python -m mars_ray` is the console script `mars-ray`."""

from mars_ray.cli import main

if __name__ == "__main__":
    main()
