/* Preloaded into a process and into all it starts: counts the system calls that change files under one folder, and
   at the k-th refuses, shortens or kills. What to do, and the count, are in memory that all of them share.

   `system_calls.py` builds this and has the other view of `struct control`. */

#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#define PATH_BYTES 4096
#define NUM_RECORDS 8192
#define PAGE_BYTES 4096

enum action { NOTHING, REFUSE, SHORTEN, KILL_BEFORE, KILL_HALFWAY, KILL_AFTER };

struct record {
    char name[16];
    int32_t pid;
    int32_t is_direct;
};

struct control {
    char root[PATH_BYTES];
    int64_t at;          /* which call is hit; 0: none, they are only counted */
    int32_t action;
    int32_t error;       /* errno of a refusal */
    int32_t is_lasting;  /* all calls after it are hit, too */
    int32_t padding;
    _Atomic int64_t num_calls;
    _Atomic int64_t num_hits;
    struct record records[NUM_RECORDS];
};

static struct control *control;

__attribute__((constructor)) static void attach(void) {
    const char *path = getenv("PENSTOCK_TEST_FAULTS");
    if (path == NULL) return;
    int descriptor = (int)syscall(SYS_openat, AT_FDCWD, path, O_RDWR | O_CLOEXEC);
    if (descriptor < 0) return;
    void *mapped = mmap(NULL, sizeof(struct control), PROT_READ | PROT_WRITE, MAP_SHARED, descriptor, 0);
    if (mapped != MAP_FAILED) control = mapped;
    syscall(SYS_close, descriptor);
}

static void die(void) {
    kill(getpid(), SIGKILL);
    for (;;) pause();
}

static int is_inside(const char *path) {
    size_t length = strlen(control->root);
    return strncmp(path, control->root, length) == 0 && (path[length] == '/' || path[length] == '\0');
}

/* Whether a call on this descriptor, or on this path from this directory, is one of those that count. */
static int concerns(int descriptor, const char *path) {
    if (path != NULL && path[0] == '/') return is_inside(path);
    char link[64], target[PATH_BYTES];
    if (descriptor == AT_FDCWD) snprintf(link, sizeof link, "/proc/self/cwd");
    else snprintf(link, sizeof link, "/proc/self/fd/%d", descriptor);
    ssize_t length = readlink(link, target, sizeof target - 1);
    if (length < 0) return 0;
    target[length] = '\0';
    return is_inside(target);
}

static int is_direct(int descriptor) {
    int flags = fcntl(descriptor, F_GETFL);
    return flags >= 0 && (flags & O_DIRECT) != 0;
}

static enum action decide(const char *name, int descriptor, const char *path) {
    int error = errno;
    enum action action = NOTHING;
    if (control != NULL && control->root[0] != '\0' && concerns(descriptor, path)) {
        int64_t number = atomic_fetch_add(&control->num_calls, 1) + 1;
        if (number <= NUM_RECORDS) {
            struct record *record = &control->records[number - 1];
            strncpy(record->name, name, sizeof record->name - 1);
            record->pid = getpid();
            record->is_direct = path == NULL && is_direct(descriptor);
        }
        int is_hit = control->at != 0 && (number == control->at || (control->is_lasting && number > control->at));
        if (is_hit) {
            atomic_fetch_add(&control->num_hits, 1);
            action = control->action;
            if (action == KILL_BEFORE) die();
        }
    }
    errno = error;
    return action;
}

/* How much of a write is done: half of it, in whole pages where it goes past the page cache. */
static size_t half(int descriptor, size_t size) {
    size_t part = size / 2;
    if (is_direct(descriptor)) part -= part % PAGE_BYTES;
    return part == 0 ? size : part;
}

#define REAL(name) \
    static __typeof__(&name) real; \
    if (real == NULL) real = (__typeof__(&name))dlsym(RTLD_NEXT, #name)

#define CALL(name, label, parameters, arguments, descriptor, path) \
    int name parameters { \
        REAL(name); \
        enum action action = decide(label, descriptor, path); \
        if (action == REFUSE) { errno = control->error; return -1; } \
        int result = real arguments; \
        if (action == KILL_AFTER || action == KILL_HALFWAY) die(); \
        return result; \
    }

#define TAKES_MODE(flags) (((flags) & O_CREAT) != 0 || ((flags) & O_TMPFILE) == O_TMPFILE)

#define OPEN(name, parameters, arguments, descriptor) \
    int name parameters { \
        REAL(name); \
        va_list more; \
        va_start(more, flags); \
        mode_t mode = TAKES_MODE(flags) ? va_arg(more, mode_t) : 0; \
        va_end(more); \
        enum action action = decide("open", descriptor, path); \
        if (action == REFUSE) { errno = control->error; return -1; } \
        int result = real arguments; \
        if (action == KILL_AFTER || action == KILL_HALFWAY) die(); \
        return result; \
    }

#define WRITE(name, label, parameters, arguments) \
    ssize_t name parameters { \
        REAL(name); \
        enum action action = decide(label, descriptor, NULL); \
        if (action == REFUSE) { errno = control->error; return -1; } \
        if (action == SHORTEN || action == KILL_HALFWAY) size = half(descriptor, size); \
        ssize_t result = real arguments; \
        if (action == KILL_AFTER || action == KILL_HALFWAY) die(); \
        return result; \
    }

OPEN(open, (const char *path, int flags, ...), (path, flags, mode), AT_FDCWD)
OPEN(open64, (const char *path, int flags, ...), (path, flags, mode), AT_FDCWD)
OPEN(openat, (int directory, const char *path, int flags, ...), (directory, path, flags, mode), directory)
OPEN(openat64, (int directory, const char *path, int flags, ...), (directory, path, flags, mode), directory)

WRITE(write, "write", (int descriptor, const void *data, size_t size), (descriptor, data, size))
WRITE(pwrite, "pwrite", (int descriptor, const void *data, size_t size, off_t at), (descriptor, data, size, at))
WRITE(pwrite64, "pwrite", (int descriptor, const void *data, size_t size, off64_t at), (descriptor, data, size, at))

CALL(fsync, "fsync", (int descriptor), (descriptor), descriptor, NULL)
CALL(fdatasync, "fsync", (int descriptor), (descriptor), descriptor, NULL)
CALL(ftruncate, "ftruncate", (int descriptor, off_t size), (descriptor, size), descriptor, NULL)
CALL(ftruncate64, "ftruncate", (int descriptor, off64_t size), (descriptor, size), descriptor, NULL)
CALL(flock, "flock", (int descriptor, int operation), (descriptor, operation), descriptor, NULL)
CALL(rename, "rename", (const char *from, const char *to), (from, to), AT_FDCWD, to)
CALL(renameat, "rename", (int old, const char *from, int new, const char *to), (old, from, new, to), new, to)
CALL(link, "link", (const char *from, const char *to), (from, to), AT_FDCWD, to)
CALL(linkat, "link", (int old, const char *from, int new, const char *to, int flags), (old, from, new, to, flags), new, to)
CALL(unlink, "unlink", (const char *path), (path), AT_FDCWD, path)
CALL(unlinkat, "unlink", (int directory, const char *path, int flags), (directory, path, flags), directory, path)
CALL(rmdir, "rmdir", (const char *path), (path), AT_FDCWD, path)
CALL(mkdir, "mkdir", (const char *path, mode_t mode), (path, mode), AT_FDCWD, path)
CALL(mkdirat, "mkdir", (int directory, const char *path, mode_t mode), (directory, path, mode), directory, path)

/* Linux closes the descriptor and then says what went wrong before. */
int close(int descriptor) {
    REAL(close);
    enum action action = decide("close", descriptor, NULL);
    int result = real(descriptor);
    if (action == KILL_AFTER || action == KILL_HALFWAY) die();
    if (action == REFUSE) { errno = control->error; return -1; }
    return result;
}
