"""What differs between object stores: how they are opened, create a file only if absent, and say what is wrong."""

from __future__ import annotations

import inspect
from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from types import ModuleType
from typing import Any

from sd_lightning._errors import UsageError
from sd_lightning._imports import require

_HTTP_LIBRARIES = {"aiohttp", "httpcore", "httpx", "requests", "urllib3"}
_TRANSIENT_STATUS = {408, 409, 429}
_WRITER = "writer"


def causes(error: BaseException | None) -> Iterator[BaseException]:
    """Yield an error and what it was raised from."""
    while error is not None:
        yield error
        error = error.__cause__


@dataclass(frozen=True)
class Provider(ABC):
    """One kind of object store.

    Attributes:
        protocol: What its URLs begin with.
        package: The module of its fsspec file system.
        extra: The extra of this package that installs it.
        tries: How often to try where the provider's library does not try again by itself.
    """

    protocol: str
    package: str
    extra: str
    tries: int

    @abstractmethod
    def open(self, who: str) -> Any:
        """Return a new fsspec file system of this process, without caches of listings."""

    def check_can_write(self, file_system: Any, who: str) -> None:
        """Raise a ``UsageError`` unless the installed version creates a file only if absent.

        An older s3fs or gcsfs takes the argument, drops it, and overwrites.
        """
        if "mode" not in inspect.signature(type(file_system)._pipe_file).parameters:
            raise UsageError(
                f"{who}: the installed {self.package} cannot create a file only if it is absent; expected "
                f"{self.package}>=2024.12; upgrade it: pip install --upgrade 'sd-lightning[{self.extra}]'"
            )

    @abstractmethod
    def metadata(self, writer: str) -> dict[str, Any]:
        """Return arguments that make an upload record who wrote the file."""

    @abstractmethod
    def writer(self, file_system: Any, path: str) -> str | None:
        """Return who wrote a file, as :meth:`metadata` recorded it."""

    def exists_already(self, error: Exception) -> bool:
        """Return whether an upload was refused because the file exists.

        Libraries abandon such an upload first; where that fails too, it hides the reason.
        """
        hidden: BaseException | None = error
        while hidden is not None:
            if isinstance(hidden, FileExistsError) or self.answer(hidden)[1] == 412:
                return True
            hidden = hidden.__context__
        return False

    def overwrites(self, file_system: Any, path: str) -> bool:
        """Try to create an existing file in parts; return whether the store let that happen."""
        return False

    def is_absent(self, error: Exception) -> bool:
        """Return whether there is no such file, in a bucket that there is."""
        return isinstance(error, FileNotFoundError)

    def is_beyond_end(self, error: Exception) -> bool:
        """Return whether a range of bytes begins after the end of the file."""
        return self.answer(error)[1] == 416

    def is_transient(self, error: Exception) -> bool:
        """Return whether the same request may succeed a moment later."""
        code, status = self.answer(error)
        if status is not None:
            return status >= 500 or status in _TRANSIENT_STATUS
        return code is None and any(
            isinstance(cause, TimeoutError | ConnectionError) or _root(cause) in _HTTP_LIBRARIES
            for cause in causes(error)
        )

    @abstractmethod
    def answer(self, error: BaseException) -> tuple[str | None, int | None]:
        """Return the error code and the HTTP status of the server's answer; None for what there is not."""

    @abstractmethod
    def complaint(self, error: Exception) -> str | None:
        """Return what is wrong, what is expected and the remedy; None for an error that only code can mend."""


def _root(error: BaseException) -> str:
    return type(error).__module__.partition(".")[0]


class S3(Provider):
    """Amazon S3 and stores of its protocol, through s3fs. The endpoint comes from AWS_ENDPOINT_URL(_S3)."""

    def open(self, who: str) -> Any:
        s3fs = require("s3fs", extra=self.extra, who=who)
        file_system = s3fs.S3FileSystem(
            skip_instance_cache=True,
            use_listings_cache=False,
            max_concurrency=1,
            # The caller tries again; three loops in one another would try for an hour.
            config_kwargs={"retries": {"total_max_attempts": 1}},
        )
        file_system.retries = 1
        return file_system

    def check_can_write(self, file_system: Any, who: str) -> None:
        super().check_can_write(file_system, who)
        model = file_system.s3.meta.service_model
        for operation in ("PutObject", "CompleteMultipartUpload"):
            if "IfNoneMatch" not in model.operation_model(operation).input_shape.members:
                raise UsageError(
                    f"{who}: {operation} of the installed botocore has no If-None-Match, by which a file is created "
                    "only if it is absent; expected botocore>=1.36; upgrade it: "
                    f"pip install --upgrade 'sd-lightning[{self.extra}]'"
                )

    def metadata(self, writer: str) -> dict[str, Any]:
        return {"Metadata": {_WRITER: writer}}

    def writer(self, file_system: Any, path: str) -> str | None:
        return file_system.metadata(path).get(_WRITER)

    def overwrites(self, file_system: Any, path: str) -> bool:
        bucket, key, _ = file_system.split_path(path)
        where = {"Bucket": bucket, "Key": key}
        where["UploadId"] = file_system.call_s3("create_multipart_upload", **where)["UploadId"]
        part = {
            "ETag": file_system.call_s3("upload_part", **where, PartNumber=1, Body=b"probe")["ETag"],
            "PartNumber": 1,
        }
        try:
            file_system.call_s3(
                "complete_multipart_upload", **where, MultipartUpload={"Parts": [part]}, IfNoneMatch="*"
            )
        except OSError as error:
            file_system.call_s3("abort_multipart_upload", **where)
            if not self.exists_already(error):
                raise
            return False
        return True

    def is_absent(self, error: Exception) -> bool:
        return isinstance(error, FileNotFoundError) and self.answer(error)[0] != "NoSuchBucket"

    def is_transient(self, error: Exception) -> bool:
        code, _ = self.answer(error)
        passing = (
            *require("s3fs.core", extra=self.extra, who="s3://").S3_RETRYABLE_ERRORS,
            self._botocore().ConnectionError,
            self._botocore().IncompleteReadError,
        )
        if code is None and isinstance(error, passing):
            return True
        # NoSuchUpload: an upload that was completed, of which the answer got lost.
        return code in {"NoSuchUpload", "RequestTimeout", "SlowDown"} or super().is_transient(error)

    def answer(self, error: BaseException) -> tuple[str | None, int | None]:
        for cause in causes(error):
            if isinstance(cause, self._botocore().ClientError):
                answer = cause.response
                return answer["Error"].get("Code"), answer.get("ResponseMetadata", {}).get("HTTPStatusCode")
        return None, None

    def _botocore(self) -> ModuleType:
        return require("botocore.exceptions", extra=self.extra, who="s3://")

    def complaint(self, error: Exception) -> str | None:
        code, _ = self.answer(error)
        names = {type(cause).__name__ for cause in causes(error)}
        quoted = f"({code or type(error).__name__}: {error})"
        if code == "NoSuchBucket":
            return f"the bucket does not exist {quoted}; create it, or correct the URL"
        if code in {"ExpiredToken", "ExpiredTokenException", "RequestExpired", "TokenRefreshRequired"}:
            return (
                f"the credentials have expired {quoted}; renew them, for instance with `aws sso login`, and run the "
                "same command again"
            )
        if code in {"InvalidAccessKeyId", "SignatureDoesNotMatch", "InvalidToken"}:
            return f"the credentials are not valid {quoted}; check AWS_PROFILE, AWS_ACCESS_KEY_ID and their like"
        if isinstance(error, PermissionError):
            return (
                f"access is denied {quoted}; expected s3:ListBucket and s3:GetObject, and to write s3:PutObject, "
                "s3:AbortMultipartUpload and s3:DeleteObject; grant them, or choose other credentials with AWS_PROFILE"
            )
        if names & {"NoCredentialsError", "PartialCredentialsError"}:
            return (
                f"found no credentials {quoted}; set AWS_PROFILE or AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or "
                "run `aws configure`"
            )
        if _root(error) == "botocore" or isinstance(error, OSError):
            return f"the store refuses {quoted}; check the URL, AWS_PROFILE, AWS_REGION and AWS_ENDPOINT_URL"
        return None


class GoogleStorage(Provider):
    """Google Cloud Storage, through gcsfs, which tries again by itself."""

    def open(self, who: str) -> Any:
        gcsfs = require("gcsfs", extra=self.extra, who=who)
        return gcsfs.GCSFileSystem(skip_instance_cache=True, use_listings_cache=False)

    def metadata(self, writer: str) -> dict[str, Any]:
        return {"metadata": {_WRITER: writer}}

    def writer(self, file_system: Any, path: str) -> str | None:
        return file_system.info(path).get("metadata", {}).get(_WRITER)

    def answer(self, error: BaseException) -> tuple[str | None, int | None]:
        code = getattr(error, "code", None) if _root(error) == "gcsfs" else None
        return None, int(code) if code is not None else None

    def complaint(self, error: Exception) -> str | None:
        quoted = f"({type(error).__name__}: {error})"
        if _root(error) == "google":
            return f"found no valid credentials {quoted}; run `gcloud auth application-default login`"
        if self.answer(error)[1] in {401, 403} or "Forbidden" in str(error):
            return (
                f"access is denied {quoted}; expected the role Storage Object User on the bucket; grant it, or choose "
                "other credentials with GOOGLE_APPLICATION_CREDENTIALS"
            )
        if isinstance(error, OSError) or _root(error) == "gcsfs":
            return f"the store refuses {quoted}; check the URL, and that the bucket exists"
        return None


class HuggingFace(Provider):
    """Repositories of the Hugging Face Hub, read only: it cannot create a file only if it is absent."""

    def open(self, who: str) -> Any:
        hub = require("huggingface_hub", extra=self.extra, who=who)
        return hub.HfFileSystem(skip_instance_cache=True, use_listings_cache=False)

    def check_can_write(self, file_system: Any, who: str) -> None:
        raise UsageError(
            f"{who}: hf:// is read only, since the Hub cannot create a file only if it is absent; expected a local "
            "folder, s3:// or gs://; write there and upload the result with `hf upload-large-folder`."
        )

    def metadata(self, writer: str) -> dict[str, Any]:
        raise NotImplementedError

    def writer(self, file_system: Any, path: str) -> str | None:
        raise NotImplementedError

    def answer(self, error: BaseException) -> tuple[str | None, int | None]:
        errors = require("huggingface_hub.errors", extra=self.extra, who="hf://")
        for cause in causes(error):
            if isinstance(cause, errors.HfHubHTTPError):
                return None, cause.response.status_code
        return None, None

    def is_transient(self, error: Exception) -> bool:
        offline = require("huggingface_hub.errors", extra=self.extra, who="hf://").OfflineModeIsEnabled
        return not any(isinstance(cause, offline) for cause in causes(error)) and super().is_transient(error)

    def is_absent(self, error: Exception) -> bool:
        errors = require("huggingface_hub.errors", extra=self.extra, who="hf://")
        no_repository = (errors.RepositoryNotFoundError, errors.RevisionNotFoundError)
        return isinstance(error, FileNotFoundError) and not any(isinstance(e, no_repository) for e in causes(error))

    def complaint(self, error: Exception) -> str | None:
        quoted = f"({type(error).__name__}: {error})"
        if self.answer(error)[1] in {401, 403, 404} or isinstance(error, FileNotFoundError):
            return f"no access {quoted}; check the URL, and run `hf auth login` if the repository is private or gated"
        if isinstance(error, OSError):
            return f"the Hub refuses {quoted}; check the URL, the network and HF_HUB_OFFLINE"
        return None


PROVIDERS: dict[str, Provider] = {
    "s3": S3("s3", "s3fs", "s3", tries=6),
    "gs": GoogleStorage("gs", "gcsfs", "gs", tries=2),
    "hf": HuggingFace("hf", "huggingface_hub", "all", tries=6),
}
"""Protocol -> provider."""
