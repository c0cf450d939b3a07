"""What differs between object stores: how they are opened, create a file only if absent, and say what is wrong."""

from __future__ import annotations

import inspect
import io
import os
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, BinaryIO

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
        extra: The extra of this package that installs its library.
        tries: How often to try where the provider's library does not try again by itself.
    """

    extra: str
    tries: int

    @abstractmethod
    def open(self, who: str) -> Any:
        """Return a new file system of this process, as fsspec defines it, without caches of listings."""

    def check_can_write(self, who: str) -> None:
        """Raise a ``UsageError`` if the store is read only."""
        return

    def metadata(self, writer: str) -> dict[str, Any]:
        """Return arguments that make an upload record who wrote the file; for stores that can be written."""
        raise NotImplementedError

    def writer(self, file_system: Any, path: str) -> str | None:
        """Return who wrote a file, as :meth:`metadata` recorded it; for stores that can be written."""
        raise NotImplementedError

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


@dataclass(frozen=True)
class S3Files:
    """The requests of a boto3 client that :class:`Provider.open` promises; paths are ``bucket/key``."""

    client: Any

    def cat_file(self, path: str, start: int | None = None, end: int | None = None) -> bytes:
        span = {} if start is None else {"Range": f"bytes={start}-{'' if end is None else end - 1}"}
        try:
            data: bytes = self.client.get_object(**_where(path), **span)["Body"].read()
            return data
        except self.client.exceptions.NoSuchKey as error:
            raise FileNotFoundError(path) from error

    def info(self, path: str) -> dict[str, Any]:
        try:
            answer = self.client.head_object(**_where(path))
        except self.client.exceptions.ClientError as error:
            if error.response["ResponseMetadata"]["HTTPStatusCode"] < 500:
                self.cat_file(path, start=0, end=1)  # the answer to a HEAD does not say why
            raise
        return {"type": "file", "size": answer["ContentLength"], "metadata": answer["Metadata"]}

    def find(self, path: str, **options: Any) -> dict[str, dict[str, Any]]:
        bucket, _, folder = f"{path.rstrip('/')}/".partition("/")
        pages = self.client.get_paginator("list_objects_v2").paginate(Bucket=bucket, Prefix=folder)
        return {
            f"{bucket}/{file['Key']}": {"type": "file", "size": file["Size"]}
            for page in pages
            for file in page.get("Contents", [])
        }

    def cp_file(self, source: str, path: str) -> None:
        self.info(source)  # says if it is not there
        self.client.copy(_where(source), **_where(path))  # in parts if it is large

    def rm_file(self, path: str) -> None:
        self.client.delete_object(**_where(path))

    def put_file(self, source: str, path: str, **options: Any) -> None:
        with open(source, "rb") as file:
            self._put(path, file, os.fstat(file.fileno()).st_size, **options)

    def pipe_file(self, path: str, data: bytes, **options: Any) -> None:
        self._put(path, io.BytesIO(data), len(data), **options)

    def _put(
        self, path: str, file: BinaryIO, size: int, *, chunksize: int, mode: str = "overwrite", **metadata: Any
    ) -> None:
        condition = {"IfNoneMatch": "*"} if mode == "create" else {}
        if size < 2 * chunksize:
            self.client.put_object(**_where(path), Body=file, **metadata, **condition)
        else:
            self.put_parts(path, file, chunksize=chunksize, **metadata, **condition)

    def put_parts(self, path: str, file: BinaryIO, *, chunksize: int, **options: Any) -> None:
        """Upload a file in parts; ``IfNoneMatch`` is for the request that joins them."""
        condition = {"IfNoneMatch": options.pop("IfNoneMatch")} if "IfNoneMatch" in options else {}
        upload = _where(path) | {"UploadId": self.client.create_multipart_upload(**_where(path), **options)["UploadId"]}
        parts: list[dict[str, Any]] = []
        try:
            while part := file.read(chunksize):
                number = {"PartNumber": len(parts) + 1}
                parts.append(number | {"ETag": self.client.upload_part(**upload, **number, Body=part)["ETag"]})
            self.client.complete_multipart_upload(**upload, MultipartUpload={"Parts": parts}, **condition)
        except Exception:
            with suppress(Exception):  # the bucket's lifecycle rule deletes what may not be abandoned
                self.client.abort_multipart_upload(**upload)
            raise


def _where(path: str) -> dict[str, str]:
    bucket, _, key = path.partition("/")
    return {"Bucket": bucket, "Key": key}


class S3(Provider):
    """Amazon S3 and stores of its protocol, through boto3. The endpoint comes from AWS_ENDPOINT_URL(_S3)."""

    def open(self, who: str) -> Any:
        boto3 = require("boto3", extra=self.extra, who=who)
        from botocore.config import Config

        # The caller tries again; two loops in one another would try for an hour.
        config = Config(retries={"total_max_attempts": 1}, max_pool_connections=64)
        return S3Files(boto3.session.Session().client("s3", config=config))

    def metadata(self, writer: str) -> dict[str, Any]:
        return {"Metadata": {_WRITER: writer}}

    def writer(self, file_system: Any, path: str) -> str | None:
        writer: str | None = file_system.info(path)["metadata"].get(_WRITER)
        return writer

    def overwrites(self, file_system: Any, path: str) -> bool:
        try:
            file_system.put_parts(path, io.BytesIO(b"probe"), chunksize=5, IfNoneMatch="*")
        except Exception as error:
            if not self.exists_already(error):
                raise
            return False
        return True

    def is_transient(self, error: Exception) -> bool:
        code, _ = self.answer(error)
        names = require("botocore.exceptions", extra=self.extra, who="s3://")
        lost = (names.ConnectionError, names.HTTPClientError, names.IncompleteReadError)
        return isinstance(error, lost) or code in {"RequestTimeout", "SlowDown"} or super().is_transient(error)

    def answer(self, error: BaseException) -> tuple[str | None, int | None]:
        client_error = require("botocore.exceptions", extra=self.extra, who="s3://").ClientError
        for cause in causes(error):
            if isinstance(cause, client_error):
                answer = cause.response
                return answer["Error"].get("Code"), answer.get("ResponseMetadata", {}).get("HTTPStatusCode")
        return None, None

    def complaint(self, error: Exception) -> str | None:
        code, status = self.answer(error)
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
        if status == 403:
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
        if "mode" not in inspect.signature(gcsfs.GCSFileSystem._pipe_file).parameters:  # it is dropped, and overwrites
            raise UsageError(
                f"{who}: the installed gcsfs cannot create a file only if it is absent; expected gcsfs>=2024.12; "
                f"upgrade it: pip install --upgrade 'sd-lightning[{self.extra}]'"
            )
        return gcsfs.GCSFileSystem(skip_instance_cache=True, use_listings_cache=False)

    def metadata(self, writer: str) -> dict[str, Any]:
        return {"metadata": {_WRITER: writer}}

    def writer(self, file_system: Any, path: str) -> str | None:
        writer: str | None = file_system.info(path).get("metadata", {}).get(_WRITER)
        return writer

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

    def check_can_write(self, who: str) -> None:
        raise UsageError(
            f"{who}: hf:// is read only, since the Hub cannot create a file only if it is absent; expected a local "
            "folder, s3:// or gs://; write there and upload the result with `hf upload-large-folder`."
        )

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
    "s3": S3("s3", tries=6),
    "gs": GoogleStorage("gs", tries=2),
    "hf": HuggingFace("all", tries=6),
}
"""Protocol -> provider."""
