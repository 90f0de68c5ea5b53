#include "json.h"

#include <string.h>

#include "fail.h"

enum { DEEPEST = 100 };

typedef struct { char *at; const char *name; int depth; } Reader;

static _Noreturn void damaged(const Reader *r) { fail("%s is damaged: there is no JSON before '%.20s'", r->name, r->at); }

static void skip_space(Reader *r) { r->at += strspn(r->at, " \t\r\n"); }

static int skip(Reader *r, char wanted) {
    skip_space(r);
    if (*r->at != wanted) return 0;
    r->at++;
    return 1;
}

static unsigned hex4(Reader *r) {
    unsigned code = 0;
    for (int i = 0; i < 4; i++, r->at++) {
        const char *digits = "0123456789abcdef", *found = *r->at ? strchr(digits, *r->at | (*r->at >= 'A' ? 32 : 0)) : NULL;
        if (!found) damaged(r);
        code = code * 16 + (unsigned)(found - digits);
    }
    return code;
}

/* The character after \u as UTF-8. */
static char *unicode(Reader *r, char *out) {
    unsigned code = hex4(r);
    if (code >= 0xD800 && code < 0xDC00 && r->at[0] == '\\' && r->at[1] == 'u') { /* the first half of a pair */
        r->at += 2;
        code = 0x10000 + ((code - 0xD800) << 10) + (hex4(r) - 0xDC00);
    }
    int more = code < 0x80 ? 0 : code < 0x800 ? 1 : code < 0x10000 ? 2 : 3;
    static const unsigned char lead[] = {0, 0xC0, 0xE0, 0xF0};
    *out++ = (char)(lead[more] | (code >> (6 * more)));
    while (more--) *out++ = (char)(0x80 | ((code >> (6 * more)) & 0x3F));
    return out;
}

/* A string, its escapes resolved where it stands: they only get shorter. */
static char *string(Reader *r) {
    static const char from[] = "\"\\/bfnrt", to[] = "\"\\/\b\f\n\r\t";
    if (!skip(r, '"')) damaged(r);
    char *begin = r->at, *out = begin;
    while (*r->at != '"') {
        if (!*r->at) damaged(r);
        if (*r->at != '\\') {
            *out++ = *r->at++;
            continue;
        }
        r->at++;
        const char *escape = *r->at ? strchr(from, *r->at) : NULL;
        if (escape) *out++ = to[escape - from], r->at++;
        else if (*r->at == 'u') r->at++, out = unicode(r, out);
        else damaged(r);
    }
    r->at++;
    *out = '\0';
    return begin;
}

static int word(Reader *r, const char *text) {
    size_t length = strlen(text);
    if (strncmp(r->at, text, length)) return 0;
    r->at += length;
    return 1;
}

static Json *value(Reader *r) {
    Json *made = allocate(1, sizeof *made);
    skip_space(r);
    if (*r->at == '{' || *r->at == '[') {
        char close = *r->at == '{' ? '}' : ']';
        made->kind = *r->at++ == '{' ? JSON_OBJECT : JSON_ARRAY;
        if (++r->depth > DEEPEST) damaged(r);
        if (!skip(r, close)) {
            Json **end = &made->first;
            do {
                char *key = NULL;
                if (made->kind == JSON_OBJECT && (key = string(r), !skip(r, ':'))) damaged(r);
                *end = value(r);
                (*end)->key = key;
                end = &(*end)->next;
            } while (skip(r, ','));
            if (!skip(r, close)) damaged(r);
        }
        r->depth--;
    } else if (*r->at == '"') {
        made->kind = JSON_STRING;
        made->text = string(r);
    } else if (word(r, "true")) {
        made->kind = JSON_BOOL, made->number = 1;
    } else if (word(r, "false")) {
        made->kind = JSON_BOOL;
    } else if (!word(r, "null")) {
        char *end = r->at;
        if (*end == '-' || (*end >= '0' && *end <= '9')) made->number = strtod(r->at, &end);
        if (end == r->at) damaged(r);
        made->kind = JSON_NUMBER;
        r->at = end;
    }
    return made;
}

Json *json_parse(char *text, const char *name) {
    Reader reader = {text, name, 0};
    Json *made = value(&reader);
    skip_space(&reader);
    if (*reader.at) damaged(&reader);
    return made;
}

const Json *json_find(const Json *object, const char *key) {
    for (const Json *member = object && object->kind == JSON_OBJECT ? object->first : NULL; member; member = member->next)
        if (!strcmp(member->key, key)) return member;
    return NULL;
}

const Json *json_member(const Json *object, const char *key, int kind) {
    const Json *member = json_find(object, key);
    if (!member || (int)member->kind != kind) fail("the manifest has no '%s': compile again with this version of onnxremat", key);
    return member;
}
