/* What SQLite asks of the system, written down in order, and now and then refused.
 *
 * Loaded with LD_PRELOAD. Only the database named by RELAY_SHIM_DATABASE, its -wal and its -journal
 * are watched, and the directory they lie in. The -shm file is memory shared by processes: it does
 * not outlive a power cut and SQLite rebuilds it.
 *
 * With RELAY_SHIM_RECORD every write, sync and change of a name is appended to that file, and syncs
 * are noted instead of done: the test itself never loses power. A lock across all processes makes
 * the order in the record the order in which things happened.
 *
 * With RELAY_SHIM_FAULT, while that file exists and holds "write 28" or "sync 5", operations of
 * that kind fail with that errno.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <pthread.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <unistd.h>

#if UINTPTR_MAX < UINT64_MAX
#error "offsets are passed to the system in one register"
#endif

enum { MOST_FILES = 65536 };
enum { NOT_WATCHED = 0, DATA, DIRECTORY };

struct record {
    char kind;
    char unused[3];
    uint32_t pid;
    uint64_t inode;
    uint64_t offset;
    uint32_t length;
    uint32_t unused_too;
};

static unsigned char watched[MOST_FILES];
static char database[PATH_MAX], directory[PATH_MAX], record_path[PATH_MAX], fault_path[PATH_MAX];
static int record_fd = -1;
static pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;

static void open_record(void) {
    /* Each process has an open file of its own: locks of flock() belong to it. */
    if (record_path[0])
        record_fd = syscall(SYS_openat, AT_FDCWD, record_path,
                            O_WRONLY | O_APPEND | O_CREAT | O_CLOEXEC, 0600);
}

static void before_fork(void) { pthread_mutex_lock(&mutex); }
static void after_fork(void) { pthread_mutex_unlock(&mutex); }

static void in_child(void) {
    pthread_mutex_init(&mutex, NULL);
    if (record_fd >= 0)
        syscall(SYS_close, record_fd);
    open_record();
}

static void copy_variable(char *target, const char *name) {
    const char *value = getenv(name);
    if (value && strlen(value) < PATH_MAX)
        strcpy(target, value);
}

__attribute__((constructor)) static void begin(void) {
    copy_variable(database, "RELAY_SHIM_DATABASE");
    copy_variable(record_path, "RELAY_SHIM_RECORD");
    copy_variable(fault_path, "RELAY_SHIM_FAULT");
    strcpy(directory, database);
    char *slash = strrchr(directory, '/');
    if (slash)
        *slash = 0;
    open_record();
    pthread_atfork(before_fork, after_fork, in_child);
}

static int kind_of(const char *path) {
    size_t length = strlen(database);
    if (!length || !path)
        return NOT_WATCHED;
    if (!strcmp(path, directory))
        return DIRECTORY;
    if (strncmp(path, database, length))
        return NOT_WATCHED;
    path += length;
    return !*path || !strcmp(path, "-wal") || !strcmp(path, "-journal") ? DATA : NOT_WATCHED;
}

static int kind_of_fd(int fd) { return fd >= 0 && fd < MOST_FILES ? watched[fd] : NOT_WATCHED; }

/* --- The record --------------------------------------------------------------------------- */

static void lock(void) {
    pthread_mutex_lock(&mutex);
    if (record_fd >= 0)
        syscall(SYS_flock, record_fd, LOCK_EX);
}

static void unlock(void) {
    int error = errno;
    if (record_fd >= 0)
        syscall(SYS_flock, record_fd, LOCK_UN);
    pthread_mutex_unlock(&mutex);
    errno = error;
}

static void append(char kind, uint64_t inode, uint64_t offset, const void *bytes, size_t length) {
    if (record_fd < 0)
        return;
    int error = errno;
    struct record head = {kind, {0}, getpid(), inode, offset, length, 0};
    struct iovec parts[2] = {{&head, sizeof head}, {(void *)bytes, length}};
    if (syscall(SYS_writev, record_fd, parts, 2) != (long)(sizeof head + length)) {
        static const char words[] = "the record of writes is incomplete\n";
        syscall(SYS_write, 2, words, sizeof words - 1);
        abort();
    }
    errno = error;
}

static uint64_t inode_of(int fd) {
    struct stat status;
    return fstat(fd, &status) ? 0 : status.st_ino;
}

/* Called by the load after a commit has returned: from here on it must survive. */
void relay_stamp(const char *text, size_t length) {
    lock();
    append('A', 0, 0, text, length);
    unlock();
}

/* --- Faults ------------------------------------------------------------------------------- */

static int refused(const char *what) {
    char text[64] = {0}, kind[16] = {0};
    int error = 0, fd;
    if (!fault_path[0] || (fd = syscall(SYS_openat, AT_FDCWD, fault_path, O_RDONLY | O_CLOEXEC)) < 0)
        return 0;
    syscall(SYS_read, fd, text, sizeof text - 1);
    syscall(SYS_close, fd);
    if (sscanf(text, "%15s %d", kind, &error) != 2 || strcmp(kind, what))
        return 0;
    errno = error;
    return 1;
}

/* --- What the system is asked ------------------------------------------------------------- */

static int open_at(int at, const char *path, int flags, mode_t mode) {
    int kind = kind_of(path);
    if (kind == NOT_WATCHED) {
        int fd = syscall(SYS_openat, at, path, flags, mode);
        if (fd >= 0 && fd < MOST_FILES)
            watched[fd] = NOT_WATCHED;
        return fd;
    }
    lock();
    int is_new = (flags & O_CREAT) && syscall(SYS_faccessat, AT_FDCWD, path, F_OK);
    int fd = syscall(SYS_openat, at, path, flags, mode);
    if (fd >= 0 && fd < MOST_FILES) {
        watched[fd] = kind;
        if (kind == DATA)
            append(is_new ? 'C' : 'O', inode_of(fd), 0, path, strlen(path));
    }
    unlock();
    return fd;
}

#define MODE_OF(flags)                                                                             \
    mode_t mode = 0;                                                                               \
    if ((flags) & (O_CREAT | O_TMPFILE)) {                                                         \
        va_list more;                                                                              \
        va_start(more, flags);                                                                     \
        mode = va_arg(more, mode_t);                                                               \
        va_end(more);                                                                              \
    }

int open(const char *path, int flags, ...) {
    MODE_OF(flags)
    return open_at(AT_FDCWD, path, flags, mode);
}

int open64(const char *path, int flags, ...) {
    MODE_OF(flags)
    return open_at(AT_FDCWD, path, flags, mode);
}

int openat(int at, const char *path, int flags, ...) {
    MODE_OF(flags)
    return open_at(at, path, flags, mode);
}

int openat64(int at, const char *path, int flags, ...) {
    MODE_OF(flags)
    return open_at(at, path, flags, mode);
}

int close(int fd) {
    if (fd >= 0 && fd < MOST_FILES)
        watched[fd] = NOT_WATCHED;
    return syscall(SYS_close, fd);
}

ssize_t pwrite64(int fd, const void *bytes, size_t length, off64_t offset) {
    if (kind_of_fd(fd) != DATA)
        return syscall(SYS_pwrite64, fd, bytes, length, offset);
    if (refused("write"))
        return -1;
    lock();
    ssize_t done = syscall(SYS_pwrite64, fd, bytes, length, offset);
    if (done > 0)
        append('W', inode_of(fd), offset, bytes, done);
    unlock();
    return done;
}

ssize_t pwrite(int fd, const void *bytes, size_t length, off_t offset) {
    return pwrite64(fd, bytes, length, offset);
}

ssize_t write(int fd, const void *bytes, size_t length) {
    if (kind_of_fd(fd) != DATA)
        return syscall(SYS_write, fd, bytes, length);
    off_t offset = syscall(SYS_lseek, fd, 0, SEEK_CUR);
    ssize_t done = pwrite64(fd, bytes, length, offset);
    if (done > 0)
        syscall(SYS_lseek, fd, offset + done, SEEK_SET);
    return done;
}

int ftruncate64(int fd, off64_t size) {
    if (kind_of_fd(fd) != DATA)
        return syscall(SYS_ftruncate, fd, size);
    lock();
    int done = syscall(SYS_ftruncate, fd, size);
    if (!done)
        append('T', inode_of(fd), size, NULL, 0);
    unlock();
    return done;
}

int ftruncate(int fd, off_t size) { return ftruncate64(fd, size); }

static int sync_fd(int fd, long number) {
    int kind = kind_of_fd(fd);
    if (kind == NOT_WATCHED)
        return syscall(number, fd);
    if (kind == DATA && refused("sync"))
        return -1;
    if (record_fd < 0)
        return syscall(number, fd);
    lock();
    append(kind == DATA ? 'S' : 'D', inode_of(fd), 0, NULL, 0);
    unlock();
    return 0;
}

int fsync(int fd) { return sync_fd(fd, SYS_fsync); }
int fdatasync(int fd) { return sync_fd(fd, SYS_fdatasync); }

int unlink(const char *path) {
    if (kind_of(path) != DATA)
        return syscall(SYS_unlinkat, AT_FDCWD, path, 0);
    lock();
    int done = syscall(SYS_unlinkat, AT_FDCWD, path, 0);
    if (!done)
        append('U', 0, 0, path, strlen(path));
    unlock();
    return done;
}

int rename(const char *from, const char *to) {
    if (kind_of(from) == DATA || kind_of(to) == DATA) {
        static const char words[] = "the record of writes knows no renames of a database\n";
        syscall(SYS_write, 2, words, sizeof words - 1);
        abort();
    }
    return syscall(SYS_renameat2, AT_FDCWD, from, AT_FDCWD, to, 0);
}
