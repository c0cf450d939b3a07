"""Start the page."""

from sd_lightning import _conf
from sd_lightning.ui import PROGRAM

if __name__ == "__main__":
    _conf.main(PROGRAM)
